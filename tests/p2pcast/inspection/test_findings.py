"""Findings: each sentence appears for the reports that it describes, and for no others."""

from __future__ import annotations

from p2pcast.inspection.findings import findings


def tensor(name, words, changed, size, **more):
    return {
        "name": name, "words": words, "changed": changed, "share": changed / words if words else 0.0,
        "bytes": size, "exact": True,
        "bits_per_change": 8 * size / changed if changed else None, "magnitudes": None, **more,
    }  # fmt: skip


def document(*tensors, single=0.9, across=0, codecs=None, magnitudes=None, **more):
    changed = sum(t["changed"] for t in tensors)
    ones = round(single * changed)
    total = tensor("", sum(t["words"] for t in tensors), changed, sum(t["bytes"] for t in tensors))
    ulps = {
        "1": {"away": ones, "towards": 0, "across": 0},
        "2": {"away": changed - ones - across, "towards": 0, "across": across},
    }
    total |= {"codecs": codecs or {"flat": 5}, "steps_known": changed, "ulps": ulps, "magnitudes": magnitudes}
    rows = sorted(tensors, key=lambda t: -t["bytes"])
    return {"total": total, "tensors": rows, "learning_rate": None, "learning_rate_given": False, **more}


LAYERS = [tensor(f"model.layers.{n}.mlp.weight", 10_000, 100, 100) for n in range(8)]


def test_ordinary_delta_has_one_finding():
    assert findings(document(*LAYERS)) == ["1 % of the values changed, at 8.0 bits a change."]


def test_unchanged_state_has_one_finding():
    assert findings(document(tensor("a", 10, 0, 0))) == ["Nothing changed."]


def test_large_tensor_is_named():
    sentences = findings(document(*LAYERS, tensor("lm_head.weight", 20_000, 1200, 1200)))
    assert "lm_head.weight takes 60 % of the bytes and has 20 % of the values." in sentences


def test_large_kind_of_tensors_is_named():
    fat = [tensor(f"model.layers.{n}.norm.weight", 100, 90, 100) for n in range(8)]
    sentences = findings(document(*LAYERS, *fat))
    assert "The 8 tensors model.layers.*.norm.weight take 50 % of the bytes and have 0.99 % of the values." in sentences
    assert not any("mlp" in sentence for sentence in sentences)


def test_costly_tensor_is_named():
    sentences = findings(document(*LAYERS, tensor("odd", 10_000, 100, 400)))
    assert "odd takes 32.0 bits a change; the mean is 10.7." in sentences


def test_many_changes_and_fully_changed_tensors_are_named():
    sentences = findings(document(*LAYERS, tensor("scale", 4000, 4000, 90), tensor("still", 10, 0, 0)))
    assert "That is many" in sentences[0]
    assert "scale changed in every value." in sentences
    assert sentences[-1] == "1 of 10 tensors did not change (0.012 % of the values)."


def test_large_steps_and_sign_changes_are_named():
    sentences = findings(document(*LAYERS, single=0.5, across=40))
    assert any("Only 50 % of the steps" in s for s in sentences)
    assert any("5 % of the changes cross zero" in s for s in sentences)


def test_whole_cells_are_counted():
    assert any(
        "3 of 5 cells state every value" in s
        for s in findings(document(*LAYERS, codecs={"flat": 2, "dense": 1, "raw": 2}))
    )


def test_threshold_splits_small_and_large_weights():
    counts = {"words": 80_000, "changed": 800, "under": 800, "under_changed": 400}
    sentences = findings(document(*LAYERS, magnitudes=counts, learning_rate=1e-6, learning_rate_given=True))[-1]
    assert "1 % of the weights" in sentences
    assert "η = 1e-06" in sentences
    assert (
        "50 % of these changed, and 0.51 % of the others. These weights account for 50 % of the changes." in sentences
    )
    assert "not given" in findings(document(*LAYERS, magnitudes=counts, learning_rate=1e-6))[-1]


def test_unknown_counts_ask_for_the_base():
    made = document(*LAYERS)
    made["total"] |= {"exact": False, "bits_per_change": None}
    assert "--base DIR" in findings(made)[0]
