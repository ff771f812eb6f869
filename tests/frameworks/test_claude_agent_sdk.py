"""Claude's Agent SDK, with the program that it brings. Its own words and tools are left out, for a tiny policy."""

import asyncio

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage, create_sdk_mcp_server, query, tool
from problems import calculate


def options(root, tmp_path, **more):
    environment = {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_SMALL_FAST_MODEL": "policy"}
    environment |= {"IS_SANDBOX": "1", "CLAUDE_CONFIG_DIR": str(tmp_path / "claude"), "DISABLE_AUTOUPDATER": "1"}
    # Claude Code asks for an effort, and `serve` was told to answer without.
    return ClaudeAgentOptions(
        model="policy",
        system_prompt="calc",
        tools=[],
        setting_sources=[],
        cwd=tmp_path,
        env=environment,
        permission_mode="bypassPermissions",
        **more,
    )


async def results(messages):
    return [message async for message in messages if isinstance(message, ResultMessage)]


def test_a_query(root, tmp_path):
    (result,) = asyncio.run(results(query(prompt="12+7", options=options(root, tmp_path, max_turns=1))))
    assert result.usage["output_tokens"] > 0 and not result.is_error


def test_a_client_with_a_tool_and_two_turns(root, tmp_path):
    @tool("calc", "a+b", {"e": str})
    async def calc(arguments):
        return {"content": [{"type": "text", "text": calculate(arguments["e"])}]}

    server = create_sdk_mcp_server("tools", tools=[calc])

    async def scene():
        async with ClaudeSDKClient(options(root, tmp_path, mcp_servers={"tools": server}, max_turns=3)) as client:
            ended = []
            for problem in ("12+7", "6*8"):
                await client.query(problem)
                ended += await results(client.receive_response())
            return ended

    ended = asyncio.run(scene())
    assert len(ended) == 2 and all(result.usage["output_tokens"] > 0 for result in ended)
