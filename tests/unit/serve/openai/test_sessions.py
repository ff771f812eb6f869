"""What a session captures, asked by OpenAI's SDK: the tokens of every turn, and what follows from what comes back."""

import asyncio
from functools import partial

import pytest
from openai import APITimeoutError, BadRequestError, InternalServerError

from tests.unit.serve.opened import ADD, BYTES, END, said, served, session, shown, user
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.sampler import SamplingFailed
from torchtitan_rl.tasks.family import stream


async def run(scene):
    return await scene


async def test_a_conversation_becomes_prompts_that_extend_each_other():
    async def scene():
        async with session("hi" + END, "ok" + END) as (opened, sdk, sampler):
            first = await sdk.chat.completions.create(model="policy", messages=[user("a")])
            answer = first.choices[0].message
            assert (answer.content, first.choices[0].finish_reason) == ("hi", "stop")
            await sdk.chat.completions.create(model="policy", messages=[user("a"), answer, user("b")])
            first, second = opened.turns()
            assert shown(first.prompt_tokens) == f"<|user|>a{END}<|assistant|>"
            assert second.prompt_tokens[: len(first.prompt_tokens) + 3] == [
                *first.prompt_tokens,
                *first.completion.tokens,
            ]
            assert shown(second.prompt_tokens) == f"<|user|>a{END}<|assistant|>hi{END}<|user|>b{END}<|assistant|>"
            assert [tokens for tokens, _ in sampler.asked] == [first.prompt_tokens, second.prompt_tokens]
            assert opened.counts == {"drift": 0, "undelivered": 0, "refused": 0}

    await run(scene())


async def test_sampled_tokens_are_kept_though_their_text_has_other_tokens():
    async def scene():
        # The tokenizer writes "é" as two bytes; here the policy sampled the first byte of "é" alone, which no text has.
        broken = [*BYTES.encode("x"), BYTES.encode("é")[0]]
        async with session(broken, "ok" + END) as (opened, sdk, _):
            first = await sdk.chat.completions.create(model="policy", messages=[user("a")], max_tokens=2)
            answer = first.choices[0].message
            assert answer.content == "x\ufffd"
            await sdk.chat.completions.create(model="policy", messages=[user("a"), answer, user("b")])
            first, second = opened.turns()
            assert second.prompt_tokens[len(first.prompt_tokens) :][:3] == [*broken, BYTES.convert_tokens_to_ids(END)]
            assert opened.counts["drift"] == 0

    await run(scene())


async def test_turn_i_samples_from_the_stream_of_seed_and_i():
    async def scene():
        async with session("a", "b", "c", seed=11) as (_, sdk, sampler):
            await sdk.chat.completions.create(model="policy", messages=[user("a")], n=2)
            await sdk.chat.completions.create(model="policy", messages=[user("a")], seed=5)
            assert [params.seed for _, params in sampler.asked] == [stream(11, 0), stream(11, 1), stream(11, 2)]

    await run(scene())


async def test_choices_of_one_seed_are_drawn_apart():
    """By a client without a session: pass@k of n equal completions is no pass@k."""
    async with served("a", "b", "c") as (_, sdk, sampler):
        await sdk.chat.completions.create(model="policy", messages=[user("a")], n=2, seed=5)
        await sdk.chat.completions.create(model="policy", messages=[user("a")], seed=5)
        assert [params.seed for _, params in sampler.asked] == [5, 6, 5]


@pytest.mark.parametrize("rest", [" 42\n", "Obs: 42\n"])
async def test_a_text_that_goes_on_after_a_stop_text_has_it_once(rest):
    """An agent that writes the observation after `Obs:`, or that writes `Obs:` itself because the answer lacks it."""
    async with session("act x\nObs:", "done" + END) as (opened, sdk, _):
        first = await sdk.completions.create(model="policy", prompt="Q: 1\n", stop=["Obs:"])
        text = first.choices[0].text
        assert text == "act x\n"
        await sdk.completions.create(model="policy", prompt=f"Q: 1\n{text}{rest}")
        assert shown(opened.turns()[1].prompt_tokens) == "Q: 1\nact x\nObs: 42\n"


async def test_siblings_of_a_completion_that_fails_are_given_up():
    running = []

    class OneFails:
        async def sample(self, tokens, params, *, policy_version=None):
            running.append(None)
            try:
                if len(running) == 1:
                    raise RuntimeError("a replica was restarted")
                await asyncio.sleep(60)
            finally:
                running.pop()

    async with session("a") as (opened, sdk, _):
        opened.policy.generator = OneFails()
        with pytest.raises(InternalServerError, match="a replica was restarted"):
            await sdk.chat.completions.create(model="policy", messages=[user("a")], n=3)
        assert running == [] and isinstance(opened.failure, SamplingFailed)


async def test_branches_retries_and_compacted_context_become_sequences_of_their_own():
    async def scene():
        async with session(*(f"{i}{END}" for i in range(5))) as (opened, sdk, _):
            create = sdk.chat.completions.create
            await create(model="policy", messages=[user("a")])  # 0
            await create(model="policy", messages=[user("a")])  # 1: asked again
            await create(model="policy", messages=[user("a"), said("0"), user("b")])  # 2: after 0
            await create(model="policy", messages=[user("a"), said("1"), user("b")])  # 3: after 1
            await create(model="policy", messages=[user("in short: b"), user("c")])  # 4: compacted
            texts = [shown(turn.completion.tokens)[0] for turn in opened.turns()]
            assert texts == ["0", "2", "1", "3", "4"]
            turns = opened.turns()
            for before, after in ((0, 1), (2, 3)):
                so_far = [*turns[before].prompt_tokens, *turns[before].completion.tokens]
                assert turns[after].prompt_tokens[: len(so_far)] == so_far
            assert opened.counts["drift"] == 0

    await run(scene())


@pytest.mark.parametrize("back, drifts", [("hi  \n", 0), ("hi", 0), ("Hi", 1), ("", 1)])
async def test_what_comes_back_changed_is_rendered_anew_and_counted(back, drifts):
    async def scene():
        async with session("hi " + END, "ok" + END) as (opened, sdk, _):
            await sdk.chat.completions.create(model="policy", messages=[user("a")])
            await sdk.chat.completions.create(model="policy", messages=[user("a"), said(back), user("b")])
            first, second = opened.turns()
            kept = second.prompt_tokens[: len(first.prompt_tokens) + 4] == first.prompt_tokens + first.completion.tokens
            assert kept == (not drifts)
            assert opened.counts["drift"] == drifts
            text = "hi " if kept else back
            assert shown(second.prompt_tokens) == f"<|user|>a{END}<|assistant|>{text}{END}<|user|>b{END}<|assistant|>"

    await run(scene())


async def test_an_edited_message_keeps_the_tokens_of_the_turns_before_it():
    async def scene():
        async with session("one" + END, "two" + END, "three" + END) as (opened, sdk, _):
            create = sdk.chat.completions.create
            await create(model="policy", messages=[user("a")])
            await create(model="policy", messages=[user("a"), said("one"), user("b")])
            await create(model="policy", messages=[user("a"), said("one"), user("b"), said("2"), user("c")])
            turns = opened.turns()
            assert shown(turns[2].prompt_tokens).endswith(
                f"one{END}<|user|>b{END}<|assistant|>2{END}<|user|>c{END}<|assistant|>"
            )
            so_far = turns[0].prompt_tokens + turns[0].completion.tokens
            assert turns[2].prompt_tokens[: len(so_far)] == so_far
            assert opened.counts["drift"] == 1

    await run(scene())


async def test_calls_of_tools_are_read_and_kept_when_they_come_back_written_otherwise():
    call = "[add(a=1, b=2)]"

    async def scene():
        async with session(call + END, "3" + END, tool_parser="pythonic") as (opened, sdk, _):
            asked = [user("1+2")]
            first = await sdk.chat.completions.create(model="policy", messages=asked, tools=[ADD])
            message, reason = first.choices[0].message, first.choices[0].finish_reason
            assert (message.content, reason) == (None, "tool_calls")
            assert message.tool_calls[0].function.name == "add"
            back = message.model_dump(exclude_none=True)
            back["tool_calls"][0]["function"]["arguments"] = '{"b":2,"a":1}'  # another order, no blanks
            tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            second = await sdk.chat.completions.create(model="policy", messages=[*asked, back, tool], tools=[ADD])
            assert second.choices[0].message.content == "3"
            assert shown(opened.turns()[1].prompt_tokens) == (
                f"<|system|>add: adds{END}<|user|>1+2{END}<|assistant|>{call}{END}<|tool|>3{END}<|assistant|>"
            )
            assert opened.counts["drift"] == 0

    await run(scene())


async def test_a_stop_text_is_cut_from_the_answer_and_kept_among_the_tokens():
    async def scene():
        async with session("yes.", "no" + END) as (opened, sdk, sampler):
            first = await sdk.chat.completions.create(model="policy", messages=[user("a")], stop=".")
            assert first.choices[0].message.content == "yes"
            assert sampler.asked[0][1].stop == ["."]
            await sdk.chat.completions.create(model="policy", messages=[user("a"), said("yes"), user("b")])
            assert shown(opened.turns()[1].prompt_tokens).startswith(f"<|user|>a{END}<|assistant|>yes.{END}<|user|>b")

    await run(scene())


async def test_completions_of_text_and_of_tokens_go_on_from_earlier_ones():
    async def scene():
        async with session("bc", "ef", "hi") as (opened, sdk, sampler):
            await sdk.completions.create(model="policy", prompt="a")
            second = await sdk.completions.create(
                model="policy", prompt="abcd", extra_body={"return_token_ids": True, "return_policy_versions": True}
            )
            choice = second.choices[0].model_dump()
            assert shown(choice["prompt_token_ids"]) == "abcd" and shown(choice["token_ids"]) == "ef"
            assert choice["policy_versions"] == [3, 3]
            await sdk.completions.create(model="policy", prompt=[*choice["prompt_token_ids"], *choice["token_ids"], 70])
            assert [tokens for tokens, _ in sampler.asked][2] == [*BYTES.encode("abcdef"), 70]
            turns = opened.turns()
            assert turns[1].prompt_tokens[:3] == turns[0].prompt_tokens + turns[0].completion.tokens
            assert len(turns) == 3

    await run(scene())


async def test_a_session_ends_at_its_limit_of_turns():
    async def scene():
        async with session("a", "b", limits=SessionLimits(max_turns=1)) as (opened, sdk, _):
            await sdk.chat.completions.create(model="policy", messages=[user("a")])
            with pytest.raises(BadRequestError, match="limit of 1 completions") as refused:
                await sdk.chat.completions.create(model="policy", messages=[user("a")])
            assert refused.value.code == "session_limit_reached"
            assert (opened.ended_by, opened.counts["refused"]) == ("turns", 1)

    await run(scene())


async def test_a_completion_that_no_client_got_uses_up_no_turn():
    """The generators fail once, and once the client gives up before they have ended."""
    async with session("ok", limits=SessionLimits(max_turns=1)) as (opened, sdk, sampler):
        create = partial(sdk.chat.completions.create, model="policy", messages=[user("a")])

        class FailsThenIsSlow:
            num_asked = 0

            async def sample(self, tokens, params, *, policy_version=None):
                self.num_asked += 1
                if self.num_asked == 1:
                    raise RuntimeError("a replica was restarted")
                if self.num_asked == 2:
                    try:
                        await asyncio.sleep(60)
                    finally:
                        self.given_up.set()
                return await sampler.sample(tokens, params, policy_version=policy_version)

        opened.policy.generator = slow = FailsThenIsSlow()
        slow.given_up = asyncio.Event()
        with pytest.raises(InternalServerError):
            await create()
        with pytest.raises(APITimeoutError):
            await create(timeout=0.3)
        await asyncio.wait_for(slow.given_up.wait(), 5)
        await asyncio.sleep(0)
        assert opened.counts["undelivered"] == 1 and opened.counts["refused"] == 1
        assert (await create()).choices[0].message.content == "ok"
        with pytest.raises(BadRequestError, match="limit of 1 completions"):
            await create()
        assert len(opened.turns()) == 1


async def test_a_prompt_that_fills_the_context_is_refused_by_the_code_that_sdks_know():
    async def scene():
        async with session("a", context_tokens=16) as (opened, sdk, sampler):
            await sdk.chat.completions.create(model="policy", messages=[user("a" * 10)])
            assert sampler.asked[0][1].max_tokens == 3  # 13 of 16 are the prompt's
            with pytest.raises(BadRequestError) as refused:
                await sdk.chat.completions.create(model="policy", messages=[user("a" * 20)])
            assert refused.value.code == "context_length_exceeded"
            assert opened.ended_by == "tokens"

    await run(scene())


async def test_the_same_text_after_an_empty_answer_is_another_branch():
    async with session(END, "ok" + END, "more" + END) as (opened, sdk, sampler):
        for _ in range(2):
            await sdk.completions.create(model="policy", prompt="Q:")
        assert [shown(tokens) for tokens, _ in sampler.asked] == ["Q:", "Q:"]
        await sdk.completions.create(model="policy", prompt="Q:ok")
        first, second, third = opened.turns()
        assert first.prompt_tokens == second.prompt_tokens
        assert third.prompt_tokens == [*second.prompt_tokens, *second.completion.tokens]


async def test_what_a_request_cannot_do_without_is_not_ignored():
    async with session("ok" + END, ignored=("prompt",)) as (_, sdk, _):
        answer = await sdk.completions.create(model="policy", prompt="Q:")
        assert answer.choices[0].text == "ok"
