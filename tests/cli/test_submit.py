"""What a job uploads, how its command names it, and what is refused before a cluster is asked."""

import shlex
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import yaml

from rollout.cli.main import main
from rollout.cli.submit_package import FILE_BYTES, PACKAGE_BYTES, Package, make_package
from rollout.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "models/tiny/config.json").write_text("{}")
    return tmp_path


def packed(target: str, *arguments: str, checkout: Path | None = None) -> Package:
    return make_package(Path(target), arguments, here=Path.cwd(), checkout=checkout)


def write(path: str, text: str = "") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_a_script_brings_the_modules_it_imports_from_its_directory_and_no_other_file(here: Path) -> None:
    write("examples/train.py", "import torch, rewards\nfrom policy.deep import act\nimport rollout\n")
    write("examples/rewards.py", "def f():\n    import words\n")
    write("examples/words.py")
    write("examples/policy/__init__.py")
    write("examples/policy/deep.py", "from policy import shared\nimport lengths\n")
    write("examples/policy/table.json", "{}")
    write("examples/policy/__pycache__/deep.pyc")
    write("examples/policy/.cache")
    write("examples/lengths.py")
    write("examples/unused.py")
    write("examples/rollout/__init__.py")
    package = packed("examples/train.py", "--steps", "2")
    names = ("lengths", "policy/__init__", "policy/deep", "rewards", "train", "words")
    assert sorted(package.files) == sorted([*(f"examples/{name}.py" for name in names), "examples/policy/table.json"])
    assert package.entrypoint == "python examples/train.py --steps 2"
    assert package.read_in_place == package.outputs == ()


def test_files_that_a_script_names_come_along(here: Path) -> None:
    write("examples/train.py", 'from side import CONFIGS\nload(CONFIGS / "a.yaml")\nB = "data/b.txt"\n')
    write("examples/side.py", 'CONFIGS = Path(__file__).resolve().parent.parent / "configs"\n')
    write("configs/a.yaml", "rollout: {model: {path: models/tiny}}")
    write("configs/unused.yaml", "{}")
    write("data/b.txt", "b")
    package = packed("examples/train.py")
    assert sorted(package.files) == ["configs/a.yaml", "data/b.txt", "examples/side.py", "examples/train.py"]
    assert yaml.safe_load(package.files["configs/a.yaml"]) == {
        "rollout": {"model": {"path": str(here / "models/tiny")}}
    }
    assert package.read_in_place == (str(here / "models/tiny"),)


def test_small_files_that_arguments_name_are_uploaded_and_the_rest_becomes_absolute(here: Path) -> None:
    write("train.py")
    write("prompts.jsonl", "{}")
    write("big.jsonl", " " * (FILE_BYTES + 1))
    write("a.yaml", "prompts: {kind: file, path: prompts.jsonl}\nother: {path: big.jsonl}\n")
    words = {
        "--config": "--config",
        "a.yaml": "a.yaml",
        "big.jsonl": f"{here}/big.jsonl",
        "./models": f"{here}/models",
        "models": "models",  # may be any word
        "--dir=models/tiny": f"--dir={here}/models/tiny",
        "rollout.model.path=models": f"rollout.model.path={here}/models",
        "run.prompts={kind: file, path: models/tiny}": f"run.prompts={{kind: file, path: {here}/models/tiny}}",
        "lr=0.5": "lr=0.5",
        "/no/such/dir": "/no/such/dir",
        "no/such/dir": "no/such/dir",
        "a=[": "a=[",
    }
    package = packed("train.py", *words)
    assert package.entrypoint.startswith("python train.py --config a.yaml ")
    assert _arguments(package) == list(words.values())
    assert sorted(package.files) == ["a.yaml", "prompts.jsonl", "train.py"]
    assert yaml.safe_load(package.files["a.yaml"]) == {
        "prompts": {"kind": "file", "path": "prompts.jsonl"},
        "other": {"path": f"{here}/big.jsonl"},
    }
    assert set(package.read_in_place) == {f"{here}/{name}" for name in ("big.jsonl", "models", "models/tiny")}


def test_outputs_are_written_where_the_user_is(here: Path) -> None:
    write("train.py")
    write("a.yaml", "out: out/a\nrollout: {run: {out: /abs}}\n")
    package = packed("train.py", "--out", "o", "--json=j", "run.out=r", "--out=/abs/o", "run.out=null", "a.yaml")
    assert _arguments(package) == [
        "--out",
        f"{here}/o",
        f"--json={here}/j",
        f"run.out={here}/r",
        "--out=/abs/o",
        "run.out=null",
        "a.yaml",
    ]
    assert yaml.safe_load(package.files["a.yaml"]) == {"out": f"{here}/out/a", "rollout": {"run": {"out": "/abs"}}}
    assert package.outputs == (f"{here}/o", f"{here}/j", f"{here}/r", "/abs/o", f"{here}/out/a", "/abs")


def test_a_configuration_is_run_with_its_prompts_and_its_output_stays(here: Path) -> None:
    write("configs/run.yaml", "model: {path: models/tiny}\nrun: {prompts: {kind: file, path: p.jsonl}, samples: 2}\n")
    write("p.jsonl", "{}")
    package = packed("configs/run.yaml", "--verify")
    assert package.entrypoint == "python -m rollout run configs/run.yaml --verify"
    assert sorted(package.files) == ["configs/run.yaml", "p.jsonl"]
    assert yaml.safe_load(package.files["configs/run.yaml"]) == {
        "model": {"path": f"{here}/models/tiny"},
        "run": {"prompts": {"kind": "file", "path": "p.jsonl"}, "samples": 2, "out": f"{here}/rollouts.parquet"},
    }


def test_a_target_elsewhere_lies_at_the_top_of_the_job(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "train.py").write_text("import side")
    (other / "side.py").touch()
    package = packed(str(other / "train.py"))
    assert sorted(package.files) == ["side.py", "train.py"]
    assert package.entrypoint == "python train.py"


def test_the_checkout_goes_along_without_byte_code_and_small(here: Path) -> None:
    write("train.py", "import rollout")
    package = packed("train.py", checkout=ROOT / "rollout")
    assert {"train.py", "rollout/__init__.py", "rollout/native/src/library.cpp"} <= set(package.files)
    assert not [place for place in package.files if "__pycache__" in place]
    archive = package.archive()
    assert len(archive) < 1_000_000
    assert archive == packed("train.py", checkout=ROOT / "rollout").archive()
    with zipfile.ZipFile(BytesIO(archive)) as found:
        assert found.read("train.py") == b"import rollout"


def test_too_much_is_refused_with_the_biggest_files(here: Path) -> None:
    write("train.py", "import data")
    write("data/__init__.py")
    with open("data/weights.bin", "wb") as file:
        file.truncate(PACKAGE_BYTES)
    write("data/more.bin", "x" * 2000)
    with pytest.raises(ConfigError, match=r"biggest are data/weights.bin \(21.0 MB\), data/more.bin \(2.0 kB\), train"):
        packed("train.py")


REFUSALS = {
    "no such file": (["none.py"], "none.py: no such file"),
    "neither kind": (["notes.txt"], r"notes.txt: expected a script (.py) or a configuration (.yaml, .yml)"),
    "a directory": (["models"], "models: expected a script"),
    "no target": ([], "CONFIG|SCRIPT"),
    "malformed YAML": (["bad.yaml"], "bad.yaml: not valid YAML"),
    "malformed sections": (["list.yaml"], "list.yaml: expected a mapping of sections"),
    "malformed Python": (["bad.py"], "bad.py: not valid Python"),
    "a job's option before --": (["ok.py", "--steps", "2"], "--steps"),
    "two targets": (["ok.py", "ok.py"], "ok.py"),
    "no cluster": (["ok.py", "--address", "http://127.0.0.1:1"], "no Ray job server answers at http://127.0.0.1:1"),
    "no cluster at its own address": (["--address", "127.0.0.1:1", "ok.py", "--", "-h"], "answers at 127.0.0.1:1"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    refusal: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    write("notes.txt")
    write("bad.yaml", "a: [")
    write("list.yaml", "[]")
    write("bad.py", "def")
    write("ok.py")
    arguments, message = REFUSALS[refusal]
    assert main(["submit", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("rollout: error: ")
    assert captured.err.count("\n") == 1


def test_a_refusal_imports_no_ray(here: Path) -> None:
    program = (
        "import sys; from rollout.cli.main import main; "
        "print(main(['submit', 'none.py']), {'ray', 'torch', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "2 set()\n"


def _arguments(package: Package) -> list[str]:
    return shlex.split(package.entrypoint)[2:]
