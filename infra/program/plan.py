"""Decides everything before the first resource: definition, bill, inputs, run. All problems are raised here.

The module reads files, but uses neither AWS nor the engine: the time and the stack's previous outputs are parameters.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet import job
from gpufleet.infra.bill import bake, limits, options, record
from gpufleet.infra.bill.answer import answer
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import problems
from gpufleet.infra.bill.fallback import Fallback, fallback_problems, price_fallbacks
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.bill.stages import StagedBill, price_stages
from gpufleet.infra.bill.table import kept_sentence
from gpufleet.infra.catalog import Catalog, load_catalog
from gpufleet.infra.compare.cheaper import Cheaper, bill_and_cheaper
from gpufleet.infra.definition.loader import find, tagged
from gpufleet.infra.definition.model import Capacity, StackDefinition
from gpufleet.infra.definition.selected import Selected
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.evidence import rehearsed
from gpufleet.infra.inputs import archive, bakes, code, folders
from gpufleet.infra.inputs.prepared import prepared_dataset
from gpufleet.infra.inputs.readiness import not_ready
from gpufleet.infra.program import ecr
from gpufleet.infra.program.boot import run_config, user_data
from gpufleet.infra.program.run_guard import Previous, RunDecision, judge
from gpufleet.infra.review import policy
from gpufleet.job.contract import run as run_file
from gpufleet.job.contract.inputs import DatasetManifest, InputManifest, WeightsManifest, read_weights, verify


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that the program will declare. All decisions are already made."""

    now: datetime
    definition: StackDefinition
    bill: Bill
    fallbacks: list[Fallback]  # the priced fallback, if the definition has one
    # every (type, zone) in which a fleet may launch nodes, by market
    pools: Mapping[Capacity, tuple[tuple[str, str], ...]]
    cheaper: Cheaper | None  # options that do the same work for less money; None for a run that has begun
    verdict: RunDecision
    archive: archive.Archive
    dataset: DatasetManifest | None  # None if the dataset is an s3:// prefix, or not prepared yet
    dataset_folder: Path | None
    # The list of base weights; None if there are none, if they are an s3:// prefix, or if they are not listed yet.
    weights: WeightsManifest | None
    weights_folder: Path | None
    # the code of a command; None if it has no code folder, or if a preview cannot pack the folder yet
    code: code.Packed | None
    inputs: dict[str, folders.Listed]  # the inputs of a command
    run_config: str  # the text of run.json
    warnings: tuple[str, ...]
    stages: tuple[Plan, ...] = ()  # the plans of a run's stages; the other fields are then those of the first stage
    staged: StagedBill | None = None  # the bill of a run in stages
    # sentences about the cost of the AMI or the snapshot of `gpufleet bake` that the nodes use
    bake: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The plans of the stages, or this plan if it has none."""
        return self.stages or (self,)

    @property
    def with_fleets(self) -> tuple[Plan, ...]:
        """The plans that have a fleet of their own."""
        return tuple(part for part in self.parts if not part.definition.fleet_of)

    @property
    def config_sha256(self) -> str:
        return hashlib.sha256(self.run_config.encode()).hexdigest()

    def user_data(self, bucket: str, log_group: str, schedule: str, notify: str = "") -> str:
        """The node's script in base64. The program calls this after AWS has returned the names."""
        script = user_data.render(
            **user_data.known(self.definition),
            archive_sha256=self.archive.sha256,
            run_config_sha256=self.config_sha256,
            bucket=bucket,
            log_group=log_group,
            schedule=schedule,
            notify=notify,
        )
        return base64.b64encode(script.encode()).decode()

    def kept_after_destroy(self) -> dict[str, str]:
        """Words about what a destroy will leave, and its price. Preview and up show them, because a destroy runs no
        program.
        """
        storages = [part.bill.kept for part in self.parts]
        monthly = sum((storage.usd_per_month for storage in storages), Decimal(0))
        return {
            "what": "; ".join(dict.fromkeys(storage.what for storage in storages)),
            "usd_per_month": f"${monthly:.4f}",
        }

    @property
    def usd(self) -> Quantiles:
        return self.staged.usd if self.staged else self.bill.usd

    def shown(self, today: date) -> list[str]:
        """The bill in a dozen lines, and a line about what a destroy will leave."""
        if self.staged:
            return [*self.staged.lines(), f"Kept after destroy: {self.kept_after_destroy()['what']}.", *self.bake]
        lines = answer(
            self.bill,
            f"gpufleet cost {self.definition.priced_argument}",
            today=today,
            cheaper=self.cheaper.line if self.cheaper else "",
            fallbacks=self.fallbacks,
        )
        return [*lines, kept_sentence(self.bill), *self.bake]

    def numbers(self) -> dict[str, Any]:
        """The bill's figures as numbers, for programs that read them through a StackReference."""
        return {
            "usd": {name: float(round(amount, 4)) for name, amount in asdict(self.usd).items()},
            "hours": {name: float(round(hours, 4)) for name, hours in asdict(self.bill.hours).items()},
            "kept_usd_per_month": float(round(self.bill.kept.usd_per_month, 4)),
        }

    def outputs(self) -> dict[str, Any]:
        """The bill's figures as stack outputs, so that later previews show each change of the bill in dollars."""
        return {
            "definition": self.definition.name,
            "bill": record.outputs(self.bill),
            "usd": {name: f"${amount:.2f}" for name, amount in asdict(self.usd).items()},
            "hours": {name: f"{hours:.2f}" for name, hours in asdict(self.bill.hours).items()},
            "kept": self.kept_after_destroy(),
            "numbers": self.numbers(),
            **self.record(),
        }

    def record(self) -> dict[str, Any]:
        """The record from which the next update decides whether a run continues."""
        return {"run": asdict(self.verdict.run), "runs": list(self.verdict.runs)}


def make(
    root: Path,
    name: str,
    *,
    now: datetime,
    previous: Previous,
    preview: bool,
    scenario: str = "",
    tags: Mapping[str, str] | None = None,
) -> Plan:
    """The plan for the definition `name`, or for one of its scenarios. `tags` are added to those of its `account`.
    Raises GpufleetError; in a preview, what `up` still needs is only a warning.
    """
    over = bool(previous.outputs.get("run"))
    try:
        path = find(name, root)
    except GpufleetError as error:  # the name may be that of a Pulumi stack, such as dev, for which there is no file
        raise GpufleetError(f"{error}\n`pulumi config set definition NAME` chooses the one to run.") from None
    definition = Selected(path=path, scenario=scenario, asked=name).load(now=now, past_deadline=over, staged=True)
    if tags:
        definition = definition.changed(lambda part: tagged(part, tags))
    goes_on = (previous.outputs.get("run") or {}).get("id") == definition.run.id
    own = archive.build(Path(job.__file__).parent)
    ends = None if goes_on else definition.expiry(now)
    job_files = [_gather(part, root, now, own, preview=preview, ends=ends) for part in definition.parts]
    codes = dict.fromkeys(files.code.sha256 for files in job_files if files.code)
    verdict = judge(
        definition,
        dataset_sha256=" ".join(filter(None, dict.fromkeys(files.dataset_sha256 for files in job_files))),
        weights_sha256=next((files.weights.sha256 for files in job_files if files.weights), None),
        code_sha256=" ".join([own.sha256, *codes]),
        previous=previous,
        now=now,
    )
    shared = Shared(root=root, now=now, verdict=verdict, archive=own, catalog=load_catalog(root, day=now.date()))
    return (
        _in_stages(definition, job_files, shared) if definition.stages else _one_job(definition, job_files[0], shared)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The values that all parts of a plan share."""

    root: Path
    now: datetime
    verdict: RunDecision
    archive: archive.Archive
    catalog: Catalog


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFiles:
    """The inputs of one job: its files on this machine, and their entries in run.json."""

    missing: list[str]  # inputs that `up` still needs
    dataset: DatasetManifest | None
    dataset_folder: Path | None
    weights: WeightsManifest | None
    weights_folder: Path | None
    code: code.Packed | None
    inputs: dict[str, folders.Listed]
    entries: dict[str, Any]  # the section `inputs` of run.json
    dataset_sha256: str

    def fields(self) -> dict[str, Any]:
        """The fields of a plan that are copied from here."""
        names = ("dataset", "dataset_folder", "weights", "weights_folder", "code", "inputs")
        return {name: getattr(self, name) for name in names}


def _gather(
    definition: StackDefinition,
    root: Path,
    now: datetime,
    own: archive.Archive,
    *,
    preview: bool,
    ends: datetime | None,
) -> JobFiles:
    """Reads the inputs of the job. `ends`: until when the fleets of a run that begins now may launch nodes; None if the
    run has begun. Raises GpufleetError; in a preview a missing input is only a warning.
    """
    folder = definition.storage.dataset_folder(root)
    missing = not_ready(definition, root)
    if ends is not None:
        missing[:0] = [*definition.fleet.market.not_begun(now), *bakes.gone_before_the_end(definition, root, ends)]
    if missing and not preview:
        raise GpufleetError("\n".join([f"{definition.source}: not ready for up", *(f"  - {line}" for line in missing)]))
    dataset = prepared_dataset(definition, root)
    if dataset and folder and not preview:
        try:
            verify(folder, dataset)  # takes long, because it reads and hashes every byte
        except ValueError as error:
            raise GpufleetError(str(error)) from error
    weights_folder = definition.storage.weights_folder(root)
    weights = _weights(weights_folder) if weights_folder else None
    tree = code.read(definition, root)
    packed = code.pack(tree, root) if tree else None
    inputs_read = folders.read(definition, root)
    entries: dict[str, Any] = {"archive": {"sha256": own.sha256, "bytes": len(own.content)}}
    if definition.job.parameters.dataset_kind:
        entries["dataset"] = input_entry(definition.storage.dataset, dataset)
    if definition.storage.base_weights is not None:
        entries["base_weights"] = input_entry(definition.storage.base_weights, weights)
    if packed:
        entries["code"] = packed.input_entry()
    earlier_stages, asked = definition.left, (name for _, name in definition.job.parameters.demands.inputs)
    handed_on = {name: _left_by(earlier_stages[name]) for name in asked if name in earlier_stages}
    if inputs_read or handed_on:
        entries["folders"] = handed_on | {name: listed.input_entry() for name, listed in inputs_read.items()}
    complete = len(inputs_read) == len(definition.storage.inputs or {})
    return JobFiles(
        missing=missing,
        dataset=dataset,
        dataset_folder=folder,
        weights=weights,
        weights_folder=weights_folder,
        code=packed,
        inputs=inputs_read,
        entries=entries,
        dataset_sha256=" ".join(
            [
                *([dataset.sha256] if dataset else []),
                *(listed.sha256 for listed in inputs_read.values() if complete),
            ]
        ),
    )


def _left_by(stage: str) -> dict[str, Any]:
    """The entry in run.json by which a later stage reads the outputs in this stage's folder."""
    return {"uri": None, "sha256": None, "files": [], "stage": stage}


def _one_job(definition: StackDefinition, files: JobFiles, shared: Shared) -> Plan:
    """The plan of a run without stages. Raises DefinitionError."""
    root, now, catalog, continues = shared.root, shared.now, shared.catalog, shared.verdict.continues
    if continues:  # a run that continues keeps its region and types, even if new prices would exclude them
        definition = replace(definition, limits=replace(definition.limits, usd_per_hour=None))
        bill, cheaper = bill_of(definition, root, catalog, today=now.date()), None
    else:
        rules = policy.find_policy(root)
        definition = policy.held_to(definition, rules)
        bill, cheaper = bill_and_cheaper(definition, root, catalog, now=now, rules=rules)
    wrong, late = problems(definition, bill), list[str]()
    fallbacks = price_fallbacks(definition, bill, now)
    if not continues:  # if a run has begun, only its bucket shows how much work is left
        wrong += limits.deadline_problems(definition, bill, now)
        wrong += fallback_problems(definition, bill, fallbacks)
        late += limits.deadline_warnings(definition, bill, now)
        late += _unconfirmed(definition)
    if wrong and not continues:  # new prices do not stop a run that has begun
        raise DefinitionError(str(definition.source), wrong)
    late = [*map(str, wrong), *late]
    return _plan(definition, bill, files, shared, fallbacks=fallbacks, cheaper=cheaper, late=late)


def _in_stages(whole: StackDefinition, job_files: list[JobFiles], shared: Shared) -> Plan:
    """The plan of a run in stages. Raises DefinitionError."""
    rules, today, continues = policy.find_policy(shared.root), shared.now.date(), shared.verdict.continues

    def price_stage(stage: StackDefinition) -> Bill:
        return bill_of(policy.held_to(stage, rules), shared.root, shared.catalog, today=today)

    staged, wrong = price_stages(whole, price_stage, today)
    if staged is None:
        raise DefinitionError(str(whole.source), wrong)
    wrong = [
        problem for stage, bill in zip(whole.stages, staged.bills, strict=True) for problem in problems(stage, bill)
    ]
    if wrong and not continues:
        raise DefinitionError(str(whole.source), wrong)
    late = [] if continues else _unconfirmed(whole)
    plans: tuple[Plan, ...] = ()
    for stage, bill, files in reversed(list(zip(staged.launched, staged.bills, job_files, strict=True))):
        later = plans[0] if plans and plans[0].definition.fleet_of else None
        plans = (_plan(stage, bill, files, shared, late=late, whole_usd=staged.usd, following=later), *plans)
    warnings = tuple(dict.fromkeys(warning for plan in plans for warning in plan.warnings))
    baked = tuple(bake.lines(list(zip(whole.stages, staged.bills, strict=True)), shared.root))
    return replace(plans[0], definition=whole, stages=plans, staged=staged, warnings=warnings, bake=baked)


def _unconfirmed(definition: StackDefinition) -> list[str]:
    email = definition.notify.email
    return [f"{email} gets no messages until its owner confirms by the link in AWS's first message."] if email else []


def _plan(
    definition: StackDefinition,
    bill: Bill,
    files: JobFiles,
    shared: Shared,
    *,
    fallbacks: list[Fallback] | None = None,
    cheaper: Cheaper | None = None,
    late: list[str],
    whole_usd: Quantiles | None = None,
    following: Plan | None = None,
) -> Plan:
    """The plan of a stage, or of a run without stages. `following`: the plan of the stage that begins on its node."""
    far = [ecr.abroad(image, definition.fleet.region) for image in definition.job.images]
    config = run_config.run_config(
        definition,
        bill,
        files.entries,
        expires=shared.verdict.run.valid_until,
        fallbacks=fallbacks or [],
        whole_usd=whole_usd,
        following={"stage": following.definition.stage, "sha256": following.config_sha256} if following else None,
    )
    return Plan(
        now=shared.now,
        definition=definition,
        bill=bill,
        fallbacks=fallbacks or [],
        pools={market: options.pools(definition, shared.catalog, market) for market in definition.fleet.market.fleets},
        cheaper=cheaper,
        verdict=shared.verdict,
        archive=shared.archive,
        **files.fields(),
        run_config=run_file.encode(config).decode(),
        bake=tuple(bake.lines([(definition, bill)], shared.root)),
        warnings=(
            *files.missing,
            *late,
            *filter(None, [*far, rehearsed.saves_doubt(definition, shared.root)]),
            *shared.verdict.warnings,
        ),
    )


def input_entry(place: str, manifest: InputManifest | None) -> dict[str, Any]:
    """The entry of a dataset or of base weights in run.json. If its `uri` is None, the files are below inputs/<sha256>/
    in the run's bucket. For an s3:// prefix, `files` is empty, because a list in the prefix names the files.
    """
    if manifest is None:
        return {"uri": place if place.startswith("s3://") else None, "sha256": None, "files": []}
    return {"uri": None, "sha256": manifest.sha256, "files": [asdict(file) for file in manifest.files]}


def _weights(folder: Path) -> WeightsManifest | None:
    """The list of base weights in the folder; None if there is none. S3 compares uploads with the hashes in
    this list.
    """
    try:
        return read_weights(folder)
    except ValueError:
        return None
