"""Which weights sampled what, in words."""

from __future__ import annotations

from rollouts.models import ModelCall, Policy, Rollout


def call_range(call: ModelCall) -> str:
    """v14, or v14 → v15 where the weights changed while the reply was sampled."""
    last = call.policy_version_last
    changed = last is not None and last != call.policy_version
    return f"v{call.policy_version} → v{last}" if changed else f"v{call.policy_version}"


def call_change(call: ModelCall) -> str:
    """How the weights changed during a reply; empty when they did not."""
    if call.policy_version_last in (None, call.policy_version):
        return ""
    if not call.version_spans:
        return "New weights came while this reply was sampled. The server does not tell at which token."
    spans = ", then ".join(f"{n} token{'' if n == 1 else 's'} of v{version}" for version, n in call.version_spans)
    return f"New weights came while this reply was sampled: {spans}."


def rollout_range(rollout: Rollout) -> str:
    """v14, or v13 to v14; empty before the first sampled id."""
    newest, oldest = rollout.policy_version, rollout.oldest_version
    if newest is None:
        return ""
    return f"v{newest}" if oldest in (None, newest) else f"v{oldest} to v{newest}"


def staleness(rollout: Rollout, policy: Policy) -> int | None:
    """By how many versions the rollout's oldest token is behind, were it consumed now; None before the first sampled id."""
    oldest = rollout.policy_version if rollout.oldest_version is None else rollout.oldest_version
    return None if oldest is None else max(policy.version - oldest, 0)
