"""Charts are found by the shape of results; benchmarks of several units have tables of their own."""

from typing import Any

from benchmarks.tables import find_chart, shown

SYNC = {
    "collect_s": 80.0,
    "tokens_per_s": 60.0,
    "all_tokens_per_s": 60.0,
    "recomputed_tokens": 0,
    "written_bytes": 0,
    "read_bytes": 0,
    "useful_reload": None,
    "idle_share": 0.5,
}
AUTO = {
    "collect_s": 40.0,
    "tokens_per_s": 120.0,
    "all_tokens_per_s": 100.0,
    "recomputed_tokens": 7,
    "written_bytes": 3_000_000,
    "read_bytes": 1_500_000,
    "useful_reload": 0.5,
    "idle_share": 0.25,
}
LONGTAIL: dict[str, Any] = {"sync": SYNC, "auto": AUTO}
KEEP: dict[str, Any] = {
    "rates": {"step_fixed_ms": 1.0},
    "simulated": {"short": {"auto_s": 10.0, "host_s": 8.0, "none_s": 12.0, "best": "host", "regret": 1.25}},
    "real": {
        "short": {
            "fixed": "host",
            "median_ratio": 1.05,
            "low_95": 0.95,
            "high_95": 1.1,
            "pairs": [1.05, 0.95, 1.1],
            "auto_s": 10.5,
            "fixed_s": 10.0,
            "longest_s": 11.0,
        }
    },
}
CONTROL: dict[str, Any] = {"step_overhead_256_ms": 0.96, "step": {"loop_ms": 0.1}, "updates_per_s": 54837.3}
DECODING = {"update_s": 3.0, "gap_s": 0.5, "step_s": 0.25, "step_preparing_s": 0.375, "in_place_s": 2.0}
STORED: dict[str, Any] = {
    "update_s": 2.0,
    "trainer_s": 1.0,
    "prepare_s": 0.25,
    "commit_s": 0.75,
    "in_place_s": 1.0,
    "one_worker": {"in_place_s": 0.75},
    "decoding": DECODING,
}
WEIGHTS: dict[str, Any] = {
    "smollm2": {
        "nbytes": 8,
        "memcpy_s": 0.5,
        "one_worker": {"memcpy_s": 0.25},
        "object_store": STORED,
        "recompute": DECODING | {"gap_s": 0.75},
    },
    "load_average": 0.5,
}
FAR = {"mean_abs_delta": 1e-2, "max_abs_delta": 1e-1}
NEAR = {"mean_abs_delta": 1e-6, "max_abs_delta": 1e-5}
MISMATCH: dict[str, Any] = {
    "fp32": {"after": {"tokens": 6, "trainer_fp32": NEAR, "other_weights": FAR}},
    "bf16": {"pool": {"tokens": 6, "suspensions": 3, "trainer_fp32": FAR, "trainer_bf16": FAR}},
    "fp32_mean_abs_delta": 1e-6,
}


def test_what_is_charted_are_rates_or_durations_that_entries_share_or_single_ones() -> None:
    rates = find_chart({"tokens_per_s": {"rollout": 2.0, "vllm": 1.0}, "a": {"x_ms": 1}, "b": {"x_ms": 2}})
    assert rates is not None
    assert (rates.unit, rates.table.columns, list(rates.table.rows)) == ("tokens_per_s", ("rollout", "vllm"), [""])
    shared = find_chart({"a": {"x_ms": 1, "n": 3}, "b": {"x_ms": 2, "y_ms": 4}, "z_ms": 5})
    assert shared is not None
    assert (shared.unit, shared.table.columns, dict(shared.table.rows["b"])) == ("ms", ("x", "y"), {"x": 2, "y": 4})
    single = find_chart({"pool_ms": 1.0, "host_ms": 2.0})
    assert single is not None
    assert single.table.rows == {"pool": {"": 1.0}, "host": {"": 2.0}}
    assert find_chart({"nodes": 3, "only_ms": 1.0}) is None
    assert shown("counts", {"nodes": 3}).tables == ()


def test_the_sides_of_longtail_are_a_table_and_a_chart_of_their_rates() -> None:
    what = shown("longtail", LONGTAIL)
    (table,) = what.tables
    assert list(table.rows) == ["sync", "auto"]
    assert table.rows["auto"]["MB written"] == 3.0
    assert table.rows["sync"]["useful reload"] is None
    assert what.chart is not None
    assert what.chart.table.rows["auto"] == {"while collecting": 120.0, "with the rest": 100.0}


def test_keep_has_costs_by_place_and_the_real_pairs_with_their_interval() -> None:
    simulated, real = shown("keep", KEEP).tables
    assert simulated.columns == ("auto (s)", "host (s)", "none (s)", "best fixed", "auto over best")
    assert (real.rows["short"]["95 % from"], real.rows["short"]["to"], real.rows["short"]["pairs"]) == (0.95, 1.1, 3)
    chart = shown("keep", KEEP).chart
    assert chart is not None
    assert chart.table.rows == {"short": {"auto": 10.0, "host": 8.0, "none": 12.0}}
    assert len(shown("keep", KEEP | {"real": {}}).tables) == 1


def test_control_has_its_two_numbers() -> None:
    what = shown("control", CONTROL)
    (table,) = what.tables
    assert [row["measured"] for row in table.rows.values()] == [0.96, 54837.3]
    assert what.chart is None


def test_updates_have_a_row_for_each_model_and_transport() -> None:
    what = shown("weights", WEIGHTS)
    (table,) = what.tables
    assert list(table.rows) == ["smollm2, object_store", "smollm2, recompute"]
    stored = table.rows["smollm2, object_store"]
    assert (stored["both over memcpy"], stored["of one worker"], stored["longest gap (ms)"]) == (2.0, 3.0, 500.0)
    assert table.rows["smollm2, recompute"]["longest gap (ms)"] == 750.0
    assert what.chart is not None
    assert what.chart.table.rows == {"smollm2": {"object_store": 2.0}}
    alone = {name: value for name, value in STORED.items() if name != "one_worker"}
    (table,) = shown("weights", {"random": {"memcpy_s": 0.5, "object_store": alone}}).tables
    assert "of one worker" not in table.columns


def test_mismatches_are_those_of_each_trainer_by_case() -> None:
    (table,) = shown("mismatch", MISMATCH).tables
    assert table.rows["fp32, after"] == {"tokens": 6, "mean, trainer fp32": 1e-6, "max, trainer fp32": 1e-5}
    assert set(table.rows["bf16, pool"]) > {"suspensions", "mean, trainer bf16", "max, trainer bf16"}
