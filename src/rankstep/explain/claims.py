"""The claims of the story, judged from the measured numbers alone."""

from __future__ import annotations

from typing import Any

# Below this length an order that is drawn anew may well be the same one.
_FEW_SAMPLES = 8
# Where rounding alone may account for so much of the way, nothing smaller can be told from it.
_COARSE = 0.01
# A model of so many tensors has far fewer buckets; one of a few layers may have a bucket for each.
_MANY_TENSORS = 100


def judge(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each claim with whether it held, the number it rests on, its limit, and the causes if it did not.

    Args:
        facts: The document that `rankstep.explain.run.run` makes, without its claims.
    """
    return [
        *_world(facts["world"]),
        *_samples(facts["samples"]),
        *_gradients(facts["gradients"]),
        *_drift(facts),
        *_averaging(facts),
        *_backward(facts["backward"]),
        *_whatif(facts["whatif"], facts["gradients"]["tolerance"]),
        *_steps(facts["steps"]),
    ]


def held(facts: dict[str, Any], name: str) -> bool:
    """Return whether a claim of a judged document held."""
    return all(claim["held"] for claim in facts["claims"] if claim["claim"] == name)


def _claim(
    name: str,
    held: bool,
    value: float | None,
    limit: float | None = None,
    causes: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "claim": name,
        "held": held,
        "value": value,
        "limit": limit,
        "causes": [] if held else causes or [],
    }


def _at_most(
    name: str, value: float | None, limit: float, causes: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """A number that is None was NaN or infinite."""
    held = value is not None and value <= limit
    return _claim(name, held, value, limit, causes or _not_finite(value))


def _not_finite(value: float | None) -> list[dict[str, Any]]:
    return [{"cause": "not_finite"}] if value is None else []


def _world(world: dict[str, Any]) -> list[dict[str, Any]]:
    ranks, second = world["ranks"], world["two_nodes"]
    sizes = {rank["parameter_bytes"] for rank in ranks}
    before = {rank["digest_before"] for rank in ranks}
    after = {rank["digest_after"] for rank in ranks}
    copied = after == {ranks[0]["digest_before"]} and len(before) > 1
    places = [[rank["node"], rank["local_rank"], rank["rank"]] for rank in second["ranks"]]
    numbered = (
        _in_order(ranks, world["ranks_per_node"])
        and _in_order(second["ranks"], second["ranks_per_node"])
        and len(places) == second["nodes"] * second["ranks_per_node"]
        and all(rank["heard"] == places for rank in second["ranks"])
    )
    missing = [{"cause": "no_second_world", "said": second["problem"]}] if second["problem"] else []
    return [
        _claim("world.rank", numbered, len({place[2] for place in places}), causes=missing),
        _claim("world.whole", len(sizes) == 1, ranks[0]["parameter_bytes"]),
        _claim("world.copied", copied, len(after), 1),
    ]


def _in_order(ranks: list[dict[str, Any]], per_node: int) -> bool:
    """Say whether every rank is there once, and where its node and local rank put it."""
    return [rank["rank"] for rank in ranks] == list(range(len(ranks))) and all(
        rank["rank"] == rank["node"] * per_node + rank["local_rank"]
        and rank["local_rank"] < per_node
        for rank in ranks
    )


def _samples(samples: dict[str, Any]) -> list[dict[str, Any]]:
    counted, ranks = samples["counted_samples"], samples["ranks"]
    once = samples["dealt_least"] == samples["dealt_most"] == 1 and samples["dealt"] == counted
    padded = (
        samples["padded_least"] >= 1
        and samples["padded_dealt"] == ranks[0]["samples_padded"] * len(ranks)
        and len({rank["samples_padded"] for rank in ranks}) == 1
    )
    places = sum(rank["places"] for rank in ranks)
    forgotten = sum(rank["same_places_without_set_epoch"] for rank in ranks)
    told = sum(rank["same_places_with_set_epoch"] for rank in ranks)
    orders = forgotten == places and (told < places or counted < _FEW_SAMPLES)
    return [
        _claim("samples.once", once, samples["dealt_most"], 1),
        _claim("samples.padded", padded, samples["padded_dealt"]),
        _claim("samples.set_epoch", orders, told / places, 1),
    ]


def _gradients(gradients: dict[str, Any]) -> list[dict[str, Any]]:
    limit, causes = gradients["tolerance"], gradients["causes"]
    exact = gradients["uneven"]["exact_relative"]
    return [
        _at_most("gradients.mean", gradients["difference_relative"], limit, causes),
        _at_most("gradients.wrapper", gradients["wrapper_difference_relative"], limit, causes),
        _at_most("gradients.uneven", exact, limit, causes),
    ]


def _drift(facts: dict[str, Any]) -> list[dict[str, Any]]:
    drift = facts["drift"]
    alone = drift["alone"][-1]
    apart = drift["alone_checksums"][-1] > 1 and (alone is None or alone > 0)
    same = all(count == 1 for count in drift["together_checksums"])
    return [
        _claim("drift.alone", apart, alone, causes=_no_difference(facts["gradients"])),
        _claim("drift.together", same, max(drift["together_checksums"]), 1),
    ]


def _no_difference(gradients: dict[str, Any]) -> list[dict[str, Any]]:
    """Where all ranks have the same gradient, it is all one whether somebody averages, and what."""
    seen = {(rank["length"], rank["element"]) for rank in gradients["ranks"]}
    return [{"cause": "equal_gradients"}] if len(seen) == 1 else []


def _averaging(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Rounding grows with the weights, the difference is told in units of the way gone: hence the limit."""
    averaging, tolerance = facts["averaging"], facts["gradients"]["tolerance"]
    rows = {row["optimizer"]: row for row in averaging["optimizers"]}
    scale = tolerance * averaging["steps"] * (facts["drift"]["weights_length"] or 0.0)
    claims = []
    for name, row in rows.items():
        limit = max(tolerance, scale / row["moved"]) if row["moved"] else tolerance
        value = row["apart_every_step_relative"]
        if name.startswith("SGD") and "job" not in name:
            word = "averaging.momentum" if "momentum" in name else "averaging.sgd"
            claims.append(_at_most(word, value, limit))
        elif "job" not in name:
            word = f"averaging.{name.lower()}"
            held = value is not None and value > limit
            causes = _not_finite(value) or _no_difference(facts["gradients"])
            if not causes and limit >= _COARSE:
                causes = [{"cause": "coarse_weights"}]
            claims.append(_claim(word, held, value, limit, causes))
    return claims


def _backward(backward: dict[str, Any]) -> list[dict[str, Any]]:
    params, buckets = len(backward["names"]), len(backward["plan"])
    members = {bucket["bucket"]: set(bucket["params"]) for bucket in backward["plan"]}
    once = ordered = filled = True
    for rank in backward["ranks"]:
        ready = {event["param"]: event["at"] for event in rank["ready"]}
        once &= len(ready) == len(rank["ready"]) <= params
        launches = [bucket["launched"] for bucket in rank["buckets"]]
        ordered &= launches == sorted(launches)
        filled &= all(
            ready[param] <= bucket["launched"]
            for bucket in rank["buckets"]
            for param in members[bucket["bucket"]] & set(ready)
        )
    return [
        _claim("backward.once", once, params),
        _claim("backward.filled", filled, buckets),
        _claim("backward.order", ordered, buckets),
        _claim("backward.count", backward["all_reduces"] == buckets, backward["all_reduces"]),
    ]


def _whatif(whatif: dict[str, Any], tolerance: float) -> list[dict[str, Any]]:
    counts = True
    worst: float | None = 0.0
    single = whatif["many"]["ways"][0]
    for model in (whatif["job"], whatif["many"]):
        ways = {way["way"]: way for way in model["ways"]}
        alone, plan, one = (ways[name] for name in ("per_parameter", "plan", "one_bucket"))
        counts &= alone["all_reduces"] >= alone["tensors"]
        few = plan["tensors"] // 10 if plan["tensors"] >= _MANY_TENSORS else plan["tensors"]
        counts &= 1 <= one["all_reduces"] <= plan["all_reduces"] <= few
        for way in model["ways"]:
            value = way["difference_relative"]
            worst = None if worst is None or value is None else max(worst, value)
    return [
        _claim("whatif.count", counts, single["all_reduces"]),
        _at_most("whatif.same", worst, tolerance),
    ]


def _steps(steps: dict[str, Any]) -> list[dict[str, Any]]:
    most = max(row["checksums"] for row in steps["rows"])
    return [
        _claim("steps.weights", most == 1, most, 1),
        _claim("steps.state", steps["state_checksums"] == 1, steps["state_checksums"], 1),
    ]
