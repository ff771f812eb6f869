"""The command itself: near names, an example in each verb's help, what shells complete."""

import argparse
import importlib.metadata
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_rl.cli import controller_run, exit_status, main
from torchtitan_rl.cli.verb_arguments import add_restarts, without_restarts
from torchtitan_rl.cli.verbs import VERBS, Verb
from torchtitan_rl.config.completion import field_flags
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.types.ends import PREEMPTED_STATUS, Preempted

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
EVERY = list(VERBS)


@pytest.mark.parametrize(
    "words, said",
    [
        (["trian", QUICKSTART], "verb='trian': there is no such verb; did you mean train?"),
        (["xyz"], "verb='xyz': there is no such verb; use one of quickstart, train, "),
        (["--debug", "train", QUICKSTART], "'--debug': the verb comes first; write torchtitan-rl VERB --debug"),
        (["train", QUICKSTART, "--dry-rn"], "--dry-rn: there is no such option; did you mean --dry-run?"),
        (
            ["train", QUICKSTART, "--max_restart=3"],
            "--max_restart=3: there is no such option; did you mean --max-restarts?",
        ),
        (["plot", "runs/first", "--metrcs", "a"], "'--metrcs': plot has no such option; did you mean --metrics?"),
        (["show", QUICKSTART, "--sead", "1"], "--sead=1: there is no such field; did you mean --seed?"),
        (["show", QUICKSTART, "--controller.num-step", "1"], "did you mean --controller.num-steps?"),
        (["rehearse", QUICKSTART, "--host", "2"], "--host: there is no such option; did you mean --hosts?"),
    ],
)
def test_a_name_that_is_nearly_right_is_told_the_right_one(words, said, capsys):
    assert main.main(words) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--until", "160"], "--until=160: must be from 0 to below controller.num_steps=160; use such a step"),
        (["--until", "-1"], "--until=-1: must be from 0"),
        (
            ["--until", "3", "--algorithm.num-epochs", "2"],
            "=160, a multiple of the 2 steps of a batch; use such a step",
        ),
    ],
)
def test_a_step_until_which_no_run_goes_is_refused(words, said, capsys):
    assert main.main(["train", QUICKSTART, "--dry-run", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--serve", "70000"], "port=70000: is none; use one up to 65535, or 0 for one that is free"),
        (["--serve", "0", "--serve-host", "0.0.0.0"], "--serve-host=0.0.0.0: other machines reach it"),
        (["--serve", "0", "--api-key-file", "nowhere"], "--api-key-file=nowhere: cannot be read"),
        (["--resume", "runs/nowhere"], "--resume=runs/nowhere: there is no such directory"),
        (["--hosts", ""], "hosts='': is not the address of a worker; write tcp://HOST:PORT"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse(words, said, capsys):
    assert main.main(["train", QUICKSTART, "--dry-run", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["serve-tinker"], ["sweep", "--seeds", "0", "--set", "seed=1,2"]])
def test_a_negative_number_of_restarts_is_refused_by_every_verb(words, capsys):
    with pytest.raises(SystemExit):
        main.main([words[0], QUICKSTART, *words[1:], "--max-restarts", "-1"])
    assert "argument --max-restarts: -1: must not be negative; use 0 for none" in capsys.readouterr().err


def test_the_version_needs_no_verb(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchtitan-rl {importlib.metadata.version('torchtitan-rl')}\n"


@pytest.mark.parametrize("verb", ["show", "serve-tinker"])
def test_a_field_of_another_type_is_named_before_anything_is_derived(verb, tmp_path, capsys):
    file = tmp_path / "config.py"
    file.write_text(
        "from tests.kit.run_config import run_config\n\n\ndef config():\n    made = run_config()\n"
        "    made.sampling.max_tokens = '64'\n    made.trainer.training.seq_len = 0\n    return made\n"
    )
    assert main.main([verb, str(file)]) == 1
    assert "sampling.max_tokens='64': is of type str, the field takes int" in capsys.readouterr().err


NUMBERED = """
import dataclasses
from {quickstart} import config as quickstart
from torchtitan_rl.tasks.letter_sort import LetterSort

class Numbered(LetterSort):
    @dataclasses.dataclass(kw_only=True)
    class Config(LetterSort.Config):
        def build(self):
            return Numbered(self)

    def task(self, split, index):
        return dataclasses.replace(super().task(split, index), id=17)

def config():
    return dataclasses.replace(quickstart(), task=Numbered.Config(min_letters=4, max_letters=6))
"""


def test_a_dry_run_refuses_tasks_that_no_table_can_hold(tmp_path, capsys):
    file = tmp_path / "numbered.py"
    file.write_text(NUMBERED.format(quickstart="torchtitan_rl.assets.quickstart"))
    assert main.main(["train", str(file), "--dry-run"]) == 1
    assert "task.id=17: is no text; give each task a text of its own" in capsys.readouterr().err


def test_a_dry_run_refuses_a_directory_that_holds_a_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert main.main(["train", QUICKSTART, "--dry-run", "--output-dir", str(tmp_path)]) == 1
    assert "already holds a run" in capsys.readouterr().err


def test_a_port_that_is_taken_is_noticed_before_anything_starts(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main.main(["train", QUICKSTART, "--dry-run", "--serve", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_an_attempt_restarts_nothing_however_often_the_option_is_given():
    parser = argparse.ArgumentParser()
    add_restarts(parser, 3, "")
    words = without_restarts(["--max-restarts", "5", "--max-restarts=7"])
    assert parser.parse_args(words).max_restarts == 0


@pytest.mark.parametrize(
    "words, said",
    [
        (["--max-tokens", "0"], "--max-tokens=0: an answer needs at least 1; use 1 or more"),
        (["--temperature", "-1"], "--temperature=-1.0: must be finite and not negative; 0 is greedy"),
        (["--temperature", "0.005"], "--temperature=0.005: is below the engine's smallest; use 0, or 0.01 or more"),
    ],
)
def test_sample_refuses_numbers_before_anything_starts(words, said, tmp_path):
    command = [sys.executable, "-m", "torchtitan_rl.cli", "sample", "--checkpoint", str(tmp_path), "--prompt", "a"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and said in ended.stderr


def test_a_fork_is_resumed_in_a_directory(capsys):
    assert main.main(["fork", "runs/first", "--at", "2", "--resume", "auto"]) == 1
    assert "--resume=auto: needs the fork's directory; give it as --output-dir" in capsys.readouterr().err


@pytest.mark.parametrize("verb", EVERY)
def test_each_verbs_help_has_an_example_that_the_verb_takes(verb, capsys):
    parser = main._parser(verb)
    with pytest.raises(SystemExit):
        parser.parse_args([verb, "--help"])
    (example,) = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  torchtitan-rl ")]
    program, *words = shlex.split(example.split(" > ")[0])
    assert program == "torchtitan-rl" and words[0] == verb
    _, unknown = parser.parse_known_args(words)
    flags = [word for word in unknown if word.startswith("--")]
    assert set(flags) <= set(field_flags()) and (not flags or VERBS[verb].overrides)


def without_reader():
    """A stream into a pipe that nobody reads any more, as after `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


@pytest.mark.parametrize("stream", [lambda: None, without_reader], ids=["closed", "without reader"])
def test_the_status_is_the_verbs_whatever_became_of_its_output(stream, monkeypatch):
    async def work() -> int:
        print("said")
        return 3

    verb = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: print("said") or 3)
    monkeypatch.setitem(VERBS, "doctor", Verb("print", lambda: verb, "torchtitan-rl doctor"))
    monkeypatch.setattr(sys, "stdout", stream())
    assert main.main(["doctor"]) == 3
    statuses = []
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(os, "_exit", statuses.append)
    exit_status.end_with(work())
    assert statuses == [3]


@pytest.mark.parametrize(
    "end, status", [(RuntimeError("a rank died"), 1), (Preempted("SIGTERM"), PREEMPTED_STATUS)], ids=["fails", "stops"]
)
async def test_a_run_has_its_status_whatever_became_of_stderr(end, status, monkeypatch, tmp_path):
    """As after `train CONFIG 2>&1 | head`."""

    async def finish_at_end():
        pass

    async def start(**_):
        return SimpleNamespace(
            run_dir=SimpleNamespace(path=tmp_path),
            checkpoints=SimpleNamespace(finish_at_end=finish_at_end),
            config=SimpleNamespace(record=SimpleNamespace(timeline=False)),
            state=SimpleNamespace(phase="reinforcement", phase_step=3),
            launcher=SimpleNamespace(kill=lambda: None),
            recorder=Recorder(),
        )

    async def body(controller):
        raise end

    monkeypatch.setattr(controller_run, "let_garbage_wait", lambda: None)
    monkeypatch.setattr(sys, "stderr", without_reader())
    args = argparse.Namespace(hosts=None, verb="eval", backend="local", debug=True, config=QUICKSTART)
    assert await controller_run.run_controller(args, start, body, str(tmp_path)) == status


def test_a_reader_of_tables_may_go(monkeypatch):
    monkeypatch.setattr(sys, "stdout", without_reader())
    assert main.main(["rehearse", QUICKSTART, "--no-reward-check"]) == 0


def completions(shell: str, line: str, directory: Path, capsys) -> list[str]:
    """What a shell offers for the last word of a line."""
    assert main.main(["completion", shell]) == 0
    (directory / "script").write_text(capsys.readouterr().out)
    if shell == "fish":
        command = f"source script; complete -C {shlex.quote(line)}"
    else:
        words = shlex.join(line.split(" "))
        array = "COMP_WORDS" if shell == "bash" else "words"
        command = f"source ./script; {array}=({words}); COMP_CWORD={line.count(' ')}; _torchtitan_rl"
        command += "; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run([shell, "-c", command], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [offered.split("\t")[0] for offered in done.stdout.split("\n") if offered]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_completes_verbs_options_config_files_and_fields(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    (tmp_path / "mine.py").touch()
    (tmp_path / "mine.txt").touch()
    assert completions(shell, "torchtitan-rl tra", tmp_path, capsys) == ["train"]
    assert set(completions(shell, "torchtitan-rl ", tmp_path, capsys)) >= set(EVERY)
    assert completions(shell, "torchtitan-rl train --dry", tmp_path, capsys) == ["--dry-run"]
    assert completions(shell, "torchtitan-rl show x.py --controller.num-s", tmp_path, capsys) == [
        "--controller.num-steps"
    ]
    assert completions(shell, "torchtitan-rl plot runs/first --metr", tmp_path, capsys) == ["--metrics"]
    assert "--trainer.lora.rank" in completions(shell, "torchtitan-rl train x.py --trainer.lora", tmp_path, capsys)
    assert completions(shell, "torchtitan-rl train mine", tmp_path, capsys)[0] == "mine.py"


def test_zsh_reads_the_script_and_completes_by_it(tmp_path, capsys):
    if shutil.which("zsh") is None:
        pytest.skip("no zsh")
    assert main.main(["completion", "zsh"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    command = "source ./script; print -r -- $_comps[torchtitan-rl]; emulate ksh; COMP_WORDS=(torchtitan-rl tra); "
    command += "COMP_CWORD=1; _torchtitan_rl; print -r -- ${COMPREPLY[@]}"
    done = subprocess.run(["zsh", "-f", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    registered, offered = done.stdout.splitlines()  # zsh itself leaves out what does not begin with the word
    assert registered == "_bash_complete -o default -o filenames -F _torchtitan_rl", done.stderr
    assert "train" in offered.split()


def test_a_gpus_memory_is_explained_and_its_parts_are_its_sum(capsys):
    assert main.main(["show", QUICKSTART]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("memory, a GPU with one rank of")]
    whole, parts = line.split("about ")[1].split(" GiB (")
    numbers = [float(part.rsplit(" ", 1)[1]) for part in parts.rstrip(")").split(", ")]
    assert sum(numbers) == pytest.approx(float(whole), abs=0.03) and "processes 2.00" in line
    assert "a rank's line counts tensors alone; a GPU's line is what the GPU must have" in out
    assert main.main(["show", QUICKSTART, "--roles.colocation", "all"]) == 0
    assert "policy and generator-0 take turns: of their tensors the largest turn counts" in capsys.readouterr().out
