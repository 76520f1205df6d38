"""What became of an anomaly's trigger, as the API and the page tell it."""

from __future__ import annotations

from dataclasses import replace

from warpwatch_telemetry.captures import Decision

COOLDOWN = Decision(1.5, "a7", "refused_cooldown", "llama-7b was captured for this 20 s ago <b>")


def test_an_anomaly_carries_its_decision(client, agent):
    agent.now = replace(agent.now, decisions=(COOLDOWN,))
    ended, straggler = client.get("/api/v1/anomalies").json()["anomalies"]
    assert ended["decision"] is None
    assert straggler["decision"] == {
        "time": 1.5,
        "anomaly_id": "a7",
        "outcome": "refused_cooldown",
        "detail": "llama-7b was captured for this 20 s ago <b>",
        "capture_id": None,
    }


def test_the_page_says_why_there_is_no_capture(client, agent):
    agent.now = replace(agent.now, captures=(), decisions=(COOLDOWN,))
    said = "No capture: llama-7b was captured for this 20 s ago &lt;b&gt;"
    assert said in client.get("/").text
    waits = replace(COOLDOWN, outcome="waiting", detail="whether it lasts 60 s")
    agent.now = replace(agent.now, decisions=(waits,))
    assert "Waits with a capture: whether it lasts 60 s" in client.get("/").text


def test_the_page_is_silent_where_nothing_was_wanted_or_a_capture_speaks(client, agent):
    nothing = replace(COOLDOWN, outcome="no_recipe", detail="triggers.recipes: none for crash")
    agent.now = replace(agent.now, decisions=(nothing,))
    assert "triggers.recipes" not in client.get("/").text
    agent.now = replace(agent.now, captures=())
    assert "triggers.recipes" not in client.get("/").text
