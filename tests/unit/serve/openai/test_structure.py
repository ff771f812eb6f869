"""What a request asks the answer to be, the grammar that it becomes, and where it is refused or ignored."""

import json

import openai
import pytest
import xgrammar

from tests.unit.serve.opened import ADD, END, served, session, user
from torchtitan_rl.engine.structures import structured_outputs

ASKED = {"model": "policy", "messages": [user("1+2")]}
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {
            "type": "object",
            "properties": {"e": {"type": "string"}, "digits": {"type": "integer"}, "exact": {"type": "boolean"}},
            "required": ["e"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "calc"}}


def admits(structure, text):
    """Whether a grammar admits a text and may end there."""
    grammar = xgrammar.Grammar.from_structural_tag(structure)
    matcher = xgrammar.GrammarMatcher(_compiler().compile_grammar(grammar), terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated() if text else False


def _compiler():
    vocabulary = [bytes([i]) for i in range(256)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0]))


async def structure_of(*, tool_parser="pythonic", **asked):
    """The structure that a request without a session is sampled with."""
    async with served("a" + END, tool_parser=tool_parser) as (_, sdk, sampler):
        await sdk.chat.completions.create(**ASKED, **asked)
        return sampler.asked[0][1].structure


CALLS = ['[calc(e="1+2")]', "[add(a=1, b=2)]", '[calc(e="1", digits=3), add()]']
GRAMMARS = {
    "required": (
        {"tools": [CALC, ADD], "tool_choice": "required"},
        CALLS,
        ["3", "[calc()]", '[calc(e="1")', "[sub()]"],
    ),
    "named": ({"tools": [CALC, ADD], "tool_choice": NAMED}, ['[calc(e="1", exact=true)]'], [CALLS[1], CALLS[2], "3"]),
    "one": (
        {"tools": [CALC, ADD], "tool_choice": "required", "parallel_tool_calls": False},
        CALLS[:2],
        [CALLS[2], "3"],
    ),
    "at most one": ({"tools": [CALC, ADD], "parallel_tool_calls": False}, [*CALLS[:2], "3", "[1]"], [CALLS[2]]),
    "an object": ({"response_format": {"type": "json_object"}}, ["{}", '{"b": [1]}'], ["1", "a"]),
    "a schema": ({"response_format": JSON_SCHEMA}, ['{"a": 1}', '{"a":-20}'], ["{}", '{"a": 1, "b": 2}', '{"a": "x"}']),
    "a schema or a call": ({"response_format": JSON_SCHEMA, "tools": [CALC]}, ['{"a": 1}', CALLS[0]], ["3", "{}"]),
    "a schema, no call": (
        {"response_format": JSON_SCHEMA, "tools": [CALC], "tool_choice": "none"},
        ['{"a": 1}'],
        [CALLS[0], "3"],
    ),
    "hermes": (
        {"tools": [CALC], "tool_choice": "required", "tool_parser": "hermes"},
        ['<tool_call>\n{"name": "calc", "arguments": {"e": "1"}}\n</tool_call>'],
        ["3", CALLS[0]],
    ),
    "without a parser": (
        {"tools": [CALC, ADD], "tool_choice": "required", "tool_parser": ""},
        ['[{"name": "calc", "parameters": {"e": "1"}}]'],
        ["3", CALLS[0], "[]"],
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
async def test_what_is_asked_for_is_a_grammar_that_admits_it_and_nothing_else(name):
    asked, right, wrong = GRAMMARS[name]
    structure = await structure_of(**asked)
    assert structured_outputs(structure).structural_tag == structure
    assert [admits(structure, text) for text in right] == [True] * len(right)
    assert [admits(structure, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tools": [CALC]},
        {"tools": [CALC], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [CALC], "tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
        {"reasoning_effort": "none"},
        {"temperature": 2.5},
    ],
)
async def test_what_asks_for_nothing_is_harmless(asked):
    assert await structure_of(**asked) == ""


async def test_calls_without_a_parser_are_read_as_json():
    said = '[{"name": "calc", "parameters": {"e": "1"}}]'
    async with served(said + END, said[:-5]) as (_, sdk, _):
        asked = ASKED | {"tools": [CALC], "tool_choice": "required"}
        answer = (await sdk.chat.completions.create(**asked)).choices[0]
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments, answer.message.content) == ("calc", '{"e": "1"}', None)
        cut_off = (await sdk.chat.completions.create(**asked)).choices[0].message
        assert cut_off.tool_calls is None and cut_off.content == said[:-5]


async def test_tool_choice_none_keeps_the_prompt_and_reads_no_call():
    async with session("[add(a=1, b=2)]" + END, "3" + END, tool_parser="pythonic") as (opened, sdk, sampler):
        answer = await sdk.chat.completions.create(**ASKED, tools=[ADD], tool_choice="none")
        message = answer.choices[0].message
        assert message.tool_calls is None and message.content == "[add(a=1, b=2)]"
        again = [*ASKED["messages"], message, user("and?")]
        await sdk.chat.completions.create(model="policy", messages=again, tools=[ADD])
        first, second = (tokens for tokens, _ in sampler.asked)
        assert second[: len(first)] == first and opened.turns()[1].prompt_tokens == second


WRONG = {
    "no such tool": ({"tools": [ADD], "tool_choice": NAMED}, "asks for a call of 'calc', and tools has none"),
    "no tools": ({"tool_choice": "required"}, "tool_choice: asks for a call, and tools has none"),
    "a choice that is none": ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema is given with type 'json_schema'"),
    "another format": ({"response_format": {"type": "yaml"}}, "response_format"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "has no name"),
    "a name that Python has not": (
        {"tools": [{"type": "function", "function": {"name": "a-b"}}], "tool_choice": "required"},
        "'a-b' is no name that a call in Python's form can have",
    ),
    "reasoning": ({"reasoning_effort": "high"}, "reasoning_effort: is not offered"),
    "heat": ({"temperature": 101}, "temperature: Input should be less than or equal to 100"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_cannot_be_had_is_refused_in_a_sentence(name):
    asked, message = WRONG[name]
    with pytest.raises(openai.BadRequestError, match=message):
        await structure_of(**asked)


@pytest.mark.parametrize(
    "schema", [{"type": "integer", "multipleOf": 3}, {"properties": {"a": {"not": {}}}}, {"allOf": [{}, {}]}]
)
def test_a_schema_that_the_grammar_would_pass_over_is_refused(schema):
    tag = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})
    with pytest.raises(ValueError, match="that no grammar here expresses"):
        structured_outputs(tag)
    older = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
    with pytest.raises(ValueError, match="that no grammar here expresses"):
        structured_outputs(json.dumps(older))


def test_properties_named_as_keywords_are_no_keywords():
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": [{"not": 1}]}}}
    tag = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})
    assert structured_outputs(tag).structural_tag == tag


CONSTRAINTS = {
    "tool_choice": {"tools": [ADD], "tool_choice": "required"},
    "response_format": {"response_format": JSON_SCHEMA},
    "parallel_tool_calls": {"tools": [ADD], "parallel_tool_calls": False},
    "logit_bias": {"logit_bias": {"5": 1}},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_a_session_that_trains_refuses_a_constraint_unless_it_is_ignored_and_counts_it(name):
    asked = ASKED | CONSTRAINTS[name]
    async with session("a" + END, tool_parser="pythonic") as (opened, sdk, sampler):
        with pytest.raises(openai.BadRequestError, match=rf"{name}: .*") as refused:
            await sdk.chat.completions.create(**asked)
        assert refused.value.code == "unsupported_parameter" and not sampler.asked
    async with session("a" + END, "b" + END, tool_parser="pythonic", ignored=(name,)) as (opened, sdk, sampler):
        for _ in range(2):
            await sdk.chat.completions.create(**asked)
        assert [params.structure for _, params in sampler.asked] == ["", ""]
        assert opened.counts["ignored"] == 2 and len(opened.turns()) == 2


async def test_a_session_of_an_evaluation_is_held_to_what_it_asks_for():
    async with session('{"a": 1}' + END, for_training=False) as (_, sdk, sampler):
        await sdk.chat.completions.create(**ASKED, response_format=JSON_SCHEMA)
        assert json.loads(sampler.asked[0][1].structure)["format"]["json_schema"] == SCHEMA


async def test_serving_ignores_what_it_was_told_to_and_refuses_unknown_names():
    from tests.kit.sampler import policy
    from tests.unit.serve.opened import BYTES
    from torchtitan_rl.serve.gateway import Served
    from torchtitan_rl.serve.run_gateway import Address

    def gateway(*ignored):
        door = Served(name="policy", policy=policy("a", tokenizer=BYTES), versions=list)
        return Address(port=0, ignored=ignored).gateway(door, context_tokens=64, vocab_size=262)

    assert gateway("logit_bias").sessions.ignored == ("logit_bias",)
    with pytest.raises(ValueError, match="--ignore='logit_bais': .* did you mean logit_bias?"):
        gateway("logit_bais")
    async with served("a" + END, ignored=("logit_bias",)) as (_, sdk, _):
        answer = await sdk.chat.completions.create(**ASKED, logit_bias={"5": 1})
        assert answer.choices[0].message.content == "a"
