"""A review for programs. Keys are documented in docs/review.md."""

from __future__ import annotations

from typing import Any

from infra.review.compare import Review, Side, StackReview


def record(review: Review) -> dict[str, Any]:
    """Keys as documented in docs/review.md. Money is a decimal string."""
    return {
        "schema": 1,
        "base": {"commit": review.base, "prices": review.base_prices},
        "head": {"commit": review.head, "prices": review.head_prices},
        "exit_code": review.exit_code,
        "notes": list(review.notes),
        "stacks": [_stack(stack) for stack in review.stacks],
    }


def _stack(stack: StackReview) -> dict[str, Any]:
    return {
        "stack": stack.name,
        "changed": stack.changed,
        "base": stack.base and _side(stack.base),
        "head": stack.head and _side(stack.head),
        "steps": [
            {
                "keys": list(step.keys),
                "before": step.before,
                "after": step.after,
                "p50": str(step.p50),
                "p90": str(step.p90),
            }
            for step in stack.steps
        ],
        "without_effect": list(stack.aside),
        "over_cap": stack.over_cap,
        "refused": list(stack.refused),
        "policy": [{"rule": each.rule, "message": each.message} for each in stack.policy],
    }


def _side(side: Side) -> dict[str, Any]:
    usd = side.usd
    return {
        "p50": str(usd.p50) if usd else None,
        "p90": str(usd.p90) if usd else None,
        "calibrated": side.bill.calibrated if side.bill else None,
        "errors": list(side.errors),
    }
