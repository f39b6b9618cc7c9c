"""The filters of the rollout list. They live in the URL, so a filtered list can be sent to a colleague."""

from __future__ import annotations

from typing import Any, NamedTuple

from django import forms
from django.http import QueryDict

from rollouts.lifecycle import Blame, Cause, Fidelity, State
from rollouts.selectors.rollout_filter import RolloutFilter

_ENUMS = {"state": State, "cause": Cause, "blame": Blame, "fidelity": Fidelity}


def _words(enum: Any) -> list[tuple[str, str]]:
    return [("", "any"), *((member.value, member.value.replace("_", " ")) for member in enum)]


class Chip(NamedTuple):
    """An active filter, and the query string of the same list without it."""

    label: str
    value: str
    without: str


class RolloutFilters(forms.Form):
    """Every field narrows the list; fields that do not make sense are reported and not applied."""

    state = forms.ChoiceField(choices=_words(State), required=False)
    environment = forms.CharField(required=False)
    cause = forms.ChoiceField(choices=_words(Cause), required=False)
    blame = forms.ChoiceField(choices=_words(Blame), required=False)
    reward_min = forms.FloatField(required=False, label="reward ≥")
    reward_max = forms.FloatField(required=False, label="reward ≤")
    fidelity = forms.ChoiceField(choices=_words(Fidelity), required=False)
    task = forms.CharField(required=False, label="task contains", max_length=200)
    node = forms.CharField(required=False, max_length=100)
    version = forms.IntegerField(required=False, label="policy version", min_value=0)
    run = forms.UUIDField(required=False, widget=forms.HiddenInput)
    group = forms.UUIDField(required=False, widget=forms.HiddenInput)

    def __init__(self, data: QueryDict, environment_names: list[str]) -> None:
        super().__init__(data)
        options = [("", "any"), *((name, name) for name in environment_names)]
        self.fields["environment"].widget = forms.Select(choices=options)
        for name in ("reward_min", "reward_max"):
            self.fields[name].widget.attrs["step"] = "any"
        self.full_clean()
        self._query = data

    @property
    def active(self) -> dict[str, Any]:
        return {name: value for name, value in self.cleaned_data.items() if value not in (None, "")}

    def wanted(self) -> RolloutFilter:
        """What the list shows."""
        values: dict[str, Any] = {name: _ENUMS[name](value) if name in _ENUMS else value for name, value in self.active.items()}
        return RolloutFilter(**values)

    @property
    def chips(self) -> list[Chip]:
        """The active filters as the page shows them, each with the way to drop it."""
        found = []
        for name, value in self.active.items():
            rest = self._query.copy()
            for dropped in (name, "older", "newer"):
                rest.pop(dropped, None)
            label = str(self.fields[name].label or name)
            shown = str(value)[-8:] if name in ("run", "group") else str(value).replace("_", " ")
            found.append(Chip(label, shown, rest.urlencode()))
        return found
