"""The evaluations a controller makes, with a sampler in place of its generators: what it logs, and what it can be used for."""

import asyncio

import pytest

from tests.unit.test_config import run_config
from torchtitan_rl.config import EvalSetConfig
from torchtitan_rl.controller import Controller
from torchtitan_rl.observability.progress import Progress
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.mixture import Mixture, MixtureSource
from torchtitan_rl.tasks.pass_rate_filter import PassRateFilter, write_pass_rates
from torchtitan_rl.types import Completion


class ShortWords:
    """Sorts words of up to four letters and gives longer ones back as they are."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def sample(self, tokens, params, *, policy_version=None):
        word = self.tokenizer.decode(tokens).removesuffix("=")
        answer = "".join(sorted(word)) if len(word) <= 4 else word
        tokens = self.tokenizer.encode(answer, add_special_tokens=False)
        return Completion(
            tokens=tokens, logprobs=[0.0] * len(tokens), policy_versions=[0] * len(tokens), finish_reason="stop")


def controller_of(config, path):
    controller = Controller(config, RunDir.create(path), Progress(quiet=True), None)
    controller.generator = ShortWords(controller.tokenizer)
    return controller


@pytest.fixture
def config():
    config = run_config()
    config.task = LetterSort.Config(min_letters=5, max_letters=6, num_validation=6, num_test=6)
    config.controller.eval_tasks = 6
    config.controller.eval_sets = {
        "pairs": EvalSetConfig(task=LetterSort.Config(min_letters=2, max_letters=2, num_validation=3, num_test=3),
                               num_samples=2, pass_at_k=1),
        "seen": EvalSetConfig(split="train", num_tasks=5)}
    return config


def test_every_set_has_a_line_of_its_own(config, tmp_path):
    controller = controller_of(config, tmp_path)

    async def run():
        return await controller.evaluate("validation", pass_at_k=2), await controller.evaluate_sets()

    own, sets = asyncio.run(run())
    assert (own.accuracy, own.pass_at_k, list(sets)) == (0.0, 0.0, ["pairs", "seen"])
    lines = controller.run_dir.read_metrics()
    assert [(line["eval/name"], line["eval/split"], line["eval/num_tasks"], line["eval/accuracy"]) for line in lines] == [
        ("letter_sort", "validation", 6, 0.0), ("pairs", "validation", 3, 1.0), ("seen", "train", 5, 0.0)]
    assert all(line["phase"] == "evaluation" and line["step"] == 0 for line in lines)
    assert (lines[1]["eval/avg_at_2"], lines[1]["eval/pass_at_1"], lines[1]["eval/pass_at_1_ci95_low"]) == (1.0, 1.0, 1.0)


def test_without_sets_nothing_more_is_evaluated(config, tmp_path):
    config.controller.eval_sets = {}
    controller = controller_of(config, tmp_path)
    assert asyncio.run(controller.evaluate_sets()) == {} and controller.run_dir.read_metrics() == []


def test_a_measured_family_can_be_filtered_and_mixed_in_the_next_run(config, tmp_path):
    config.task = words = LetterSort.Config(min_letters=4, max_letters=5, num_validation=6, num_test=6)
    measured = asyncio.run(controller_of(config, tmp_path / "first").evaluate("train", num_tasks=40))
    write_pass_rates(tmp_path / "rates", measured.pass_rates)
    hard = PassRateFilter.Config(task=words, pass_rates=str(tmp_path / "rates"), min_pass_rate=0.0, max_pass_rate=0.0)
    config.task = Mixture.Config(tasks={"hard": hard, "long": LetterSort.Config(min_letters=6, max_letters=6)})
    second = controller_of(config, tmp_path / "second")
    assert isinstance(second.source, MixtureSource)
    lengths = {(task.id.split("/")[0], len(task.answer)) for task in second.source.next(60)}
    assert lengths == {("hard", 5), ("long", 6)}  # words of four letters were passed
    assert 0.2 < measured.accuracy < 0.8
