"""The rules of the project's policy.yaml as a Pulumi policy pack; the rules themselves are in infra.review.policy."""

from __future__ import annotations

from pathlib import Path

from pulumi_policy import (
    EnforcementLevel,
    PolicyPack,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
)

from gpufleet.infra.review import policy

HELD = policy.find_policy(Path(__file__).resolve().parents[1]) or policy.Policy()  # without a file there are no rules


def rule(name: str, demands: str) -> ResourceValidationPolicy:
    """One rule, which no run may break."""

    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        found = policy.declared(args.resource_type, args.name, args.props)
        for each in policy.broken(HELD, found) if found else ():
            if each.rule == name:
                report(each.message)

    return ResourceValidationPolicy(
        name=name.replace("_", "-"),
        description=demands,
        validate=validate,
        enforcement_level=EnforcementLevel.MANDATORY,
    )


PolicyPack("gpufleet", [rule(name, demands) for name, demands in policy.RULES.items()])
