"""The verdict of the tenants' policy on a pod, by CEL's C++ implementation."""

from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional

from tests.helm import chart

ENVIRONMENT = cel.NewEnv(
    variables={"object": cel.Type.DYN, "variables": cel.Type.DYN},
    extensions=[ext_optional.ExtOptional()],
)


def evaluate(expression: str, pod: chart.Object, variables: chart.Object) -> Any:
    result = ENVIRONMENT.compile(expression).eval(data={"object": pod, "variables": variables})
    assert result.type().name() != "error", result
    return result.plain_value()


def refusals(policy: chart.Object, pod: chart.Object) -> list[str]:
    """Return the API server's verdict."""
    variables: chart.Object = {}
    for each in policy["spec"]["variables"]:
        variables[each["name"]] = evaluate(each["expression"], pod, variables)
    rules = policy["spec"]["validations"]
    return [e["message"] for e in rules if evaluate(e["expression"], pod, variables) is not True]
