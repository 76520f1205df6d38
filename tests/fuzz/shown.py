"""Shows a state on the page, in a scrape and by the API; no untrusted text may break them."""

from warpwatch_exporters.prometheus import Options, render
from warpwatch_serving import answers
from warpwatch_serving.answers import json_answer
from warpwatch_telemetry.anomalies import sentence
from warpwatch_telemetry.state import State


def check_shown(state: State) -> None:
    page = render(state, Options()).decode()
    assert "\r" not in page
    for anomaly in state.anomalies:
        assert "\n" not in sentence(anomaly)
    json_answer(answers.CaptureList(captures=list(state.captures)))
    json_answer(answers.RankList(ranks=list(state.ranks)))
    json_answer(answers.JobList(jobs=list(state.jobs)))
