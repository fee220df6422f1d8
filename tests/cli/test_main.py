"""The command line refuses in one line, with an exit code that says whose fault it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rollout
from rollout.cli.main import main
from tests.tiny_models import edit_json, make_tiny_llama

REFUSALS = {
    "unknown key": (["--set", "engine.bogus=1"], "engine.bogus: unknown key"),
    "unknown section": (["--set", "motor.size=1"], "motor: unknown key"),
    "bad value": (["--set", "cluster.workers=0"], "cluster.workers"),
    "malformed override": (["--set", "cluster.workers"], "expected a.b=value"),
    "missing model directory": (["--set", "model.path=no/such/model"], "no/such/model: no such directory"),
    "no prompts": (["--set", "run.prompts=null"], "run.prompts: nothing to roll out"),
    "missing prompts": (["--set", "run.prompts={kind: file, path: none.jsonl}"], "none.jsonl"),
    "output is a directory": (["--out", "."], "is not a regular file"),
    "report is a directory": (["--json", "."], "is not a regular file"),
    "unknown option": (["--frobnicate"], "--frobnicate"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration that would run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    settings = {
        "model": {"path": str(model)},
        "pool": {"budget_bytes": "64MiB"},
        "run": {"prompts": {"kind": "file", "path": "prompts.jsonl"}},
    }
    Path("run.yaml").write_text(json.dumps(settings))
    return "run.yaml"


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    refusal: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSALS[refusal]
    assert main(["run", config, *arguments]) == 2
    assert_one_line(capsys, message)


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_a_run_does_not_write_over_its_own_input(option: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("prompts.jsonl").read_bytes(), Path(config).read_bytes()
    for target in ("prompts.jsonl", config):
        assert main(["run", config, option, target]) == 2
        assert_one_line(capsys, f"{target}: cannot be written: it is named as another file of this run")
    assert (Path("prompts.jsonl").read_bytes(), Path(config).read_bytes()) == before


def test_rows_and_report_are_two_files_and_a_link_is_not_replaced(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", config, "--out", "same", "--json", "same"]) == 2
    assert_one_line(capsys, "same: cannot be written: it is named as another file of this run")
    Path("link").symlink_to("target")
    assert main(["run", config, "--out", "link"]) == 2
    assert_one_line(capsys, "link: cannot be written: it exists and is not a regular file")


def test_an_unsupported_architecture_is_named(config: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", architectures=["MambaForCausalLM"])
    try:
        assert main(["run", config]) == 2
    finally:
        edit_json(model / "config.json", architectures=["LlamaForCausalLM"])
    assert_one_line(capsys, "MambaForCausalLM")


def test_an_over_asked_cluster_is_told_with_both_numbers(
    config: str, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", config, "--set", "cluster.workers=100"]) == 2
    assert_one_line(capsys, "100 CPU, the Ray cluster has 4")


def test_a_missing_configuration_and_no_command_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "none.yaml"]) == 2
    assert_one_line(capsys, "none.yaml: cannot read the configuration")
    assert main([]) == 2
    assert_one_line(capsys, "COMMAND")


def test_a_refusal_imports_neither_ray_nor_torch_nor_arrow() -> None:
    program = (
        "import sys; from rollout.cli.main import main; "
        "print(main(['run', 'none.yaml']), {'ray', 'torch', 'pyarrow', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "2 set()\n"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "run", "none.yaml"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.startswith("rollout: error: none.yaml")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert all(option in text for option in ("CONFIG", "--set", "--out", "--json", "--verify"))


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(rollout, name) is not None for name in rollout.__all__)
    assert set(rollout.__all__) <= set(dir(rollout))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = rollout.nonsense


def assert_one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("rollout: error: ")
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
