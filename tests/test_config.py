"""Reading a configuration: what is refused, how it is said, and what `--set` can do."""

from pathlib import Path
from typing import Any

import pytest

from rollout.config import Config, FilePrompts, ReasoningGymPrompts, SamplingConfig, load_config
from rollout.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"path": "models/some"}}


def refusal(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    message = str(caught.value)
    assert message.strip(), "an empty message"
    assert "\n" not in message
    return message


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read_and_the_rest_is_default(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "c.yaml", "model: {path: models/some}\ncluster: {workers: 2}\n"))
    assert config == Config.model_validate({**MINIMAL, "cluster": {"workers": 2}})
    assert config.model.path == Path("models/some")
    assert config.engine == load_config(MINIMAL).engine


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in refusal(tmp_path / "none.yaml")
    assert "none.yaml" in refusal(str(tmp_path / "none.yaml"))


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize("text", ["model: [", "model: {path: 'x}", "a: b: c", "\tmodel:\n"])
def test_malformed_yaml_is_one_line(tmp_path: Path, text: str) -> None:
    assert "not valid YAML" in refusal(write(tmp_path / "c.yaml", text))


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"model: {path: \xff}")
    assert "not valid YAML" in refusal(path)


@pytest.mark.parametrize(("text", "got"), [("", "NoneType"), ("- a\n", "list"), ("hello", "str")])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, got: str) -> None:
    assert f"expected a mapping of sections, got {got}" in refusal(write(tmp_path / "c.yaml", text))


def test_an_unknown_key_is_named_with_its_place(tmp_path: Path) -> None:
    assert "engine.max_runing: unknown key" in refusal({**MINIMAL, "engine": {"max_runing": 3}})
    assert "engin: unknown key" in refusal({**MINIMAL, "engin": {}})


def test_a_bad_value_is_named_with_its_place_and_what_was_received() -> None:
    message = refusal({**MINIMAL, "cluster": {"workers": 0}})
    assert "cluster.workers" in message
    assert "got 0" in message
    message = refusal({**MINIMAL, "engine": {"device": "tpu"}})
    assert "engine.device" in message
    assert "'cpu'" in message


def test_every_fault_is_listed() -> None:
    message = refusal({"model": {}, "cluster": {"workers": "many"}, "nonsense": 1})
    for place in ("model.path", "cluster.workers", "nonsense"):
        assert place in message


def test_a_sampling_range_is_checked_when_loading() -> None:
    assert "top_p: got 0.0" in refusal({**MINIMAL, "sampling": {"top_p": 0.0}})
    assert "min_new_tokens" in refusal({**MINIMAL, "sampling": {"min_new_tokens": 9, "max_new_tokens": 8}})


def test_the_kind_of_prompts_selects_the_section() -> None:
    config = load_config(MINIMAL, ["run.prompts={kind: file, path: p.jsonl}"])
    assert config.run.prompts == FilePrompts(kind="file", path=Path("p.jsonl"))
    config = load_config(MINIMAL, ["run.prompts={kind: reasoning_gym, dataset: chain_sum}"])
    assert config.run.prompts == ReasoningGymPrompts(kind="reasoning_gym", dataset="chain_sum")
    assert "run.prompts" in refusal(MINIMAL, "run.prompts={kind: web}")
    assert "run.prompts" in refusal(MINIMAL, "run.prompts={path: p.jsonl}")


def test_sizes_are_read_with_units() -> None:
    assert load_config({**MINIMAL, "pool": {"budget_bytes": "512MiB"}}).pool.budget_bytes == 512 << 20


def test_an_override_replaces_a_value_and_leaves_its_neighbours() -> None:
    config = load_config({**MINIMAL, "cluster": {"workers": 4, "cpus_per_worker": 2}}, ["cluster.workers=3"])
    assert (config.cluster.workers, config.cluster.cpus_per_worker) == (3, 2)


def test_an_override_creates_the_sections_on_its_way() -> None:
    assert load_config({}, ["model.path=models/x"]).model.path == Path("models/x")
    config = load_config(MINIMAL, ["run.prompts.kind=file", "run.prompts.path=a.jsonl"])
    assert config.run.prompts == FilePrompts(kind="file", path=Path("a.jsonl"))


def test_an_override_fills_a_section_that_is_null() -> None:
    assert load_config({**MINIMAL, "cluster": None}, ["cluster.workers=2"]).cluster.workers == 2


def test_the_last_override_wins() -> None:
    assert load_config(MINIMAL, ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_an_override_is_read_as_yaml() -> None:
    config = load_config(
        {**MINIMAL, "run": {"prompts": {"kind": "file", "path": "a.jsonl"}}},
        [
            "run.prompts=null",
            "engine.deterministic=true",
            "sampling.stop_token_ids=[1, 2]",
            "sampling.top_p=0.5",
        ],
    )
    assert config.run.prompts is None
    assert config.engine.deterministic is True
    assert config.sampling.stop_token_ids == (1, 2)
    assert config.sampling.top_p == 0.5


def test_an_override_may_hold_equals_signs() -> None:
    assert load_config(MINIMAL, ["model.path=a=b=c"]).model.path == Path("a=b=c")


def test_an_override_does_not_change_its_source() -> None:
    source: dict[str, Any] = {**MINIMAL, "cluster": {"workers": 4}}
    load_config(source, ["cluster.workers=3", "run.seed=1"])
    assert source == {**MINIMAL, "cluster": {"workers": 4}}


@pytest.mark.parametrize("override", ["run.seed", "=3", "run..seed=3", "run.=3", ".seed=3", ""])
def test_an_override_of_the_wrong_form_is_refused(override: str) -> None:
    assert "expected a.b=value" in refusal(MINIMAL, override)


def test_an_override_through_a_value_is_refused() -> None:
    assert "'seed' is a value, not a section" in refusal({**MINIMAL, "run": {"seed": 1}}, "run.seed.low=3")


def test_an_override_of_a_section_by_a_value_is_refused() -> None:
    message = refusal(MINIMAL, "cluster=3")
    assert "cluster" in message
    assert "got 3" in message


def test_an_override_with_malformed_yaml_is_refused() -> None:
    assert "not valid YAML" in refusal(MINIMAL, "sampling.stop_token_ids=[1,")


def test_an_override_of_an_unknown_key_is_refused() -> None:
    assert "run.sed: unknown key" in refusal(MINIMAL, "run.sed=3")


def test_a_loaded_configuration_is_frozen() -> None:
    config = load_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]


def test_null_sampling_fields_come_from_the_model() -> None:
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    params = SamplingConfig(top_p=0.5).resolve(defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)


def test_sampling_without_model_defaults_changes_nothing_about_the_distribution() -> None:
    params = SamplingConfig().resolve()
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)


def test_the_defaults_of_a_greedy_model_are_not_used() -> None:
    params = SamplingConfig().resolve({"do_sample": False, "temperature": 0.6, "top_k": 20})
    assert (params.temperature, params.top_k) == (1.0, 0)


def test_zero_is_a_choice_and_not_a_gap() -> None:
    params = SamplingConfig(temperature=0.0, top_k=0).resolve({"temperature": 0.6, "top_k": 20})
    assert (params.temperature, params.top_k) == (0.0, 0)


def test_all_sampling_fields_reach_the_parameters() -> None:
    config = SamplingConfig(max_new_tokens=7, min_new_tokens=2, stop_token_ids=(3,), ignore_eos=True, seed=2**63)
    params = config.resolve()
    assert (params.max_new_tokens, params.min_new_tokens, params.stop_token_ids) == (7, 2, (3,))
    assert params.ignore_eos
    assert params.seed == 2**63
