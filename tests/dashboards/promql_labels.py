"""Finds the labels that the result of an expression can have, by the metric catalogue.

Raises AssertionError for a metric or label that does not exist: where a typing error would show an
empty panel, or none at all.
"""

import re

import promql_parser as promql

from warpwatch_dashboards import rule_files
from warpwatch_telemetry.catalogue import CATALOGUE

# Prometheus and the chart's monitors add these labels to every series.
TARGET = {"instance", "job", "cluster", "node"}
# The labels of kube-state-metrics.
FOREIGN = {"kube_node_status_allocatable": {"resource"}}
RECORDED = {rule.name: rule.expression for rule in rule_files.recordings()}
KEEPING = {"topk", "bottomk"}
SETS = {"and", "unless"}


def labels_of(expression: promql.Expr | None) -> set[str]:
    match expression:
        case promql.VectorSelector():
            return _of_selector(expression)
        case promql.MatrixSelector():
            return _of_selector(expression.vector_selector)
        case promql.AggregateExpr():
            return _of_aggregation(expression)
        case promql.SubqueryExpr():
            return labels_of(expression.expr)
        case promql.Call():
            return _of_call(expression)
        case promql.BinaryExpr():
            return _of_operation(expression)
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels_of(expression.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set()
    raise AssertionError(f"no dashboard uses {expression}")


def _of_selector(selector: promql.VectorSelector) -> set[str]:
    known = TARGET | metric_labels(str(selector.name))
    asked = {matcher.name for matcher in selector.matchers.matchers}
    assert asked <= known, f"{selector.name} has no {asked - known}"
    return known


def metric_labels(name: str) -> set[str]:
    """Without those of the target. Raises AssertionError for a name that does not exist."""
    if name == "up" or name in FOREIGN:
        return FOREIGN.get(name, set())
    if name in RECORDED:
        return labels_of(promql.parse(RECORDED[name]))
    short = name.removeprefix("warpwatch_")
    part = re.fullmatch(r"(.+)_(bucket|sum|count)", short)
    if part and part[1] in CATALOGUE and CATALOGUE[part[1]].kind == "histogram":
        return {*CATALOGUE[part[1]].all_labels, *(["le"] if part[2] == "bucket" else [])}
    assert name != short and short in CATALOGUE, f"{name} does not exist"
    assert CATALOGUE[short].kind != "histogram", f"{name} is a histogram"
    return set(CATALOGUE[short].all_labels)


def _of_aggregation(aggregation: promql.AggregateExpr) -> set[str]:
    inside = labels_of(aggregation.expr)
    modifier = aggregation.modifier
    named = set(modifier.labels) if modifier else set()
    assert named <= inside, f"no {named - inside} in {aggregation.expr}"
    if str(aggregation.op) in KEEPING:
        return inside
    is_without = modifier is not None and modifier.type == promql.AggModifierType.Without
    return inside - named if is_without else named


def _of_call(call: promql.Call) -> set[str]:
    inside = set[str]().union(*(labels_of(argument) for argument in call.args))
    if call.func.name == "label_replace":
        source, target = call.args[3], call.args[1]
        assert isinstance(source, promql.StringLiteral)
        assert isinstance(target, promql.StringLiteral)
        assert source.val in {"", *inside}, f"no {source.val} in {call}"
        return inside | {target.val}
    if call.func.name == "histogram_quantile":
        assert "le" in inside, f"no le in {call}"
        return inside - {"le"}
    return inside


def _of_operation(operation: promql.BinaryExpr) -> set[str]:
    left, right = labels_of(operation.lhs), labels_of(operation.rhs)
    modifier = operation.modifier
    matching = set(modifier.matching.labels) if modifier and modifier.matching else None
    assert (matching or set()) <= left & right, f"no {matching} on both sides of {operation}"
    if str(operation.op) == "or":
        return left | right
    if str(operation.op) in SETS:
        return left
    card = str(modifier.card) if modifier else ""
    taken = set(modifier.group_labels or ()) if modifier else set()
    if "ManyToOne" in card:
        assert taken <= right
        return left | taken
    if "OneToMany" in card:
        assert taken <= left
        return right | taken
    return left | right if matching is None else matching
