"""How the section `triggers` is read."""

from __future__ import annotations

from typing import Any

import pytest

from warpwatch_daemon.config import loading
from warpwatch_daemon.config.triggers import RecipeConfig, TriggersConfig
from warpwatch_telemetry.errors import UsageError


def read(**triggers: Any) -> TriggersConfig:
    return loading.parse({"triggers": triggers}, "test").triggers


def test_a_recipe_lies_on_top_of_its_kinds_default() -> None:
    recipes = read(recipes={"straggler": {"steps": 9}, "oom": {"kind": "stacks"}}).recipes
    assert recipes["straggler"] == RecipeConfig(ranks="culprit_and_peer", steps=9)
    assert recipes["oom"] == RecipeConfig(kind="stacks")
    assert recipes["hang"] == RecipeConfig(kind="stacks")


def test_null_switches_one_kind_off_and_no_other() -> None:
    recipes = read(recipes={"hang": None}).recipes
    assert recipes["hang"] is None
    assert recipes["data_stall"] is not None
    assert read(recipes={}).recipes == TriggersConfig().recipes


def test_a_variable_changes_one_key_of_one_recipe() -> None:
    config = loading.load(None, {"WARPWATCH_TRIGGERS__RECIPES__HANG__STEPS": "2"})
    assert config.triggers.recipes["hang"] == RecipeConfig(kind="stacks", steps=2)
    assert len(config.triggers.recipes) == len(TriggersConfig().recipes)


def test_what_is_shown_reads_as_what_it_was() -> None:
    config = loading.parse(
        {"triggers": {"recipes": {"hang": None, "oom": {}}, "quiet_hours": "22:00-06:00 UTC"}}, ""
    )
    assert config.triggers.quiet_hours == ("22:00-06:00 UTC",)
    assert loading.parse(loading.as_tree(config), "") == config


@pytest.mark.parametrize(
    ("triggers", "said"),
    [
        (
            {"quiet_hours": ["22:00-06:00", "25:00-06:00"]},
            "triggers.quiet_hours: expected two times of day such as 22:00-06:00 or "
            "22:00-06:00 UTC, not ['22:00-06:00', '25:00-06:00']",
        ),
        ({"quiet_hours": [1320]}, "triggers.quiet_hours: expected two times of day such as"),
        ({"quiet_hours": 5}, "triggers.quiet_hours: expected a list, not 5"),
        ({"recipes": {"hang": 5}}, "triggers.recipes.hang: expected a mapping, not 5"),
        ({"recipes": []}, "triggers.recipes: expected a mapping, not []"),
        (
            {"recipes": {"hang": {"ranks": "slow"}}},
            "triggers.recipes.hang.ranks: expected one of all, culprit, culprit_and_peer, not",
        ),
        ({"captures_per_day": -1}, "triggers.captures_per_day: expected a number >= 0"),
        (
            {"baseline": {"after": 5}},
            "triggers.baseline.after: unknown key, did you mean 'after_s'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_value(triggers: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(**triggers)
    assert said in str(caught.value)
