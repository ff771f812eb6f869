"""Every public method of the installed SDK's clients against a server: the table in docs/tinker_server.md is true.

A method counts as refused where the SDK raises what the server answered; the sentence has to say so.
"""

import asyncio
import inspect
import itertools
import warnings

import pytest

from tests.integration.conftest import ROOT
from tests.integration.test_tinker import SEQUENCE, datum
from tests.integration.tinker_server import tinker_server

pytestmark = pytest.mark.whole

tinker = pytest.importorskip("tinker")
types = tinker.types

KEY = "tml-x"
PAGE = ROOT / "docs" / "tinker_server.md"
BEGIN, END = "<!-- methods: begin -->\n", "<!-- methods: end -->\n"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture")
ALONE = {"get_telemetry", "get_console_url", "holder", "on_queue_state_change", "create_rest_client"}
"""What the SDK answers without a server, which takes no part in the table."""


class World:
    """A client of each kind, and arguments for their methods."""

    def __init__(self, url):
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self.url, self.numbers = url, itertools.count()
        self.base_model = self.service.get_server_capabilities().supported_models[0].model_name
        self.training = self.service.create_lora_training_client(self.base_model, rank=4, seed=1).result()
        self.sampling = self.training.save_weights_and_get_sampling_client().result()
        self.rest, self.admin = (kind(base_url=url, api_key=KEY) for kind in (tinker.RestClient, tinker.AdminClient))
        self.session = self.training.model_id.split(":")[0]

    def client(self, kind, method):
        """The object whose method is called."""
        if kind == "APIFuture":
            return self.training.forward([datum(weights=1.0)], "cross_entropy")
        if method == "close":  # its models leave the trainer: another session than the others'
            return tinker.ServiceClient(base_url=self.url, api_key=KEY)
        return {
            "ServiceClient": self.service, "TrainingClient": self.training, "SamplingClient": self.sampling,
            "RestClient": self.rest, "AdminClient": self.admin,
        }[kind]  # fmt: skip

    def name(self):
        return f"name-{next(self.numbers)}"

    def state(self):
        return self.training.save_state(self.name()).result(60).path

    def external(self):
        return self.training.save_weights_external(self.name()).result(60).path

    def sampler_path(self):
        return self.training.save_weights_for_sampler(self.name()).result(60).path

    def arguments(self, kind, method):
        """Arguments for a method, positional and by name; a method without an entry has none."""
        prompt, params = types.ModelInput.from_ints(SEQUENCE), types.SamplingParams(max_tokens=2, seed=1)
        training = ([datum(weights=1.0)], "cross_entropy")
        month = ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")
        entries = {
            "close": lambda: ("success",),
            "copy_weights": lambda: (self.state(),),
            "create_custom_loss": lambda: (_per_datum, {"logprobs": 1, "weights": 1}),
            "create_lora_training_client": lambda: (self.base_model, 4),
            "create_training_client_from_state": lambda: (self.state(),),
            "create_training_client_from_state_with_optimizer": lambda: (self.state(),),
            "create_sampling_client": lambda: (self.sampler_path(),),
            "forward": lambda: training,
            "forward_backward": lambda: training,
            "forward_backward_custom": lambda: (training[0], _custom_loss),
            "load_state": lambda: (self.state(),),
            "load_state_with_optimizer": lambda: (self.state(),),
            "optim_step": lambda: (types.AdamParams(learning_rate=0.0),),
            "save_state": lambda: (self.name(),),
            "save_weights_external": lambda: (self.name(),),
            "save_weights_for_sampler": lambda: (self.name(),),
            "compute_logprobs": lambda: (prompt,),
            "sample": lambda: (prompt, 1, params),
            "create": lambda: (self.service.holder,),
            "from_sampler_handle": lambda: (self.sampling.get_sampler_handle(),),
            "assign_session_project": lambda: (self.session, "project"),
            "delete_checkpoint": lambda: (self.training.model_id, self.state().split("/", 3)[3]),
            "delete_checkpoint_from_tinker_path": lambda: (self.state(),),
            "export_session_trace": lambda: (self.session,),
            "get_billing_usage": lambda: month,
            "get_external_weights_urls": lambda: (self.external(),),
            "get_sampler": lambda: (self.sampling._sampling_session_id,),
            "get_session": lambda: (self.session,),
            "get_training_run": lambda: (self.training.model_id,),
            "get_training_run_by_tinker_path": lambda: (self.state(),),
            "get_weights_info_by_tinker_path": lambda: (self.state(),),
            "list_checkpoints": lambda: (self.training.model_id,),
            "publish_checkpoint_from_tinker_path": lambda: (self.state(),),
            "search_sessions": lambda: (types.SessionSearchRequest(),),
            "set_checkpoint_ttl_from_tinker_path": lambda: (self.state(), 7200),
            "unpublish_checkpoint_from_tinker_path": lambda: (self.state(),),
        }
        named = {"create": {"base_model": self.base_model}, "from_sampler_handle": {"api_key": KEY}}
        return entries.get(method, lambda: ())(), named.get(method, {})


def _custom_loss(data, rows):
    return sum(row.sum() for row in rows), {}


def _per_datum(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:sum": loss}


def methods(kind):
    """The public methods of a client of the SDK that reach a server, in the order of their definition."""
    client = getattr(tinker, kind)
    names = [name for name in vars(client) if not name.startswith("_") and name not in ALONE]
    return [name for name in names if callable(getattr(client, name))]


async def settled(value):
    """What is left when everything that can be awaited was."""
    while inspect.isawaitable(value):
        value = await value
    return value


def refusal(world, kind, method):
    """Calls a method. Returns why it was refused; empty: it worked."""
    arguments, named = world.arguments(kind, method.removesuffix("_async"))

    async def call():
        async with asyncio.timeout(120):
            return await settled(getattr(client, method)(*arguments, **named))

    try:
        client = world.client(kind, method)
        if method.endswith("_async") or method == "coroutine":
            result = asyncio.run(call())
        else:
            result = getattr(client, method)(*arguments, **named)
            result = result.result(120) if hasattr(result, "result") else result
    except (tinker.TinkerError, ValueError, RuntimeError) as error:  # also what the SDK says where the server is plain
        return str(error) or type(error).__name__
    if isinstance(result, (tinker.TrainingClient, tinker.SamplingClient)) and kind != "TrainingClient":
        assert result.get_base_model() if isinstance(result, tinker.SamplingClient) else result.get_info()
    if isinstance(result, tinker.TrainingClient):  # its place is needed
        world.service.holder.run_coroutine_threadsafe(_unload(world.service.holder, result.model_id)).result(30)
    return ""


async def _unload(holder, model_id):
    with holder.aclient(tinker.lib.client_connection_pool_type.ClientConnectionPoolType.TRAIN) as http:
        return await http.post("/api/v1/unload_model", body={"model_id": model_id}, cast_to=object)


def table(refusals):
    """The part of the page: how many methods work, and which are refused. `name(_async)` are two methods."""
    num_refused = sum(map(bool, refusals.values()))
    lines = [
        f"Of the {len(refusals)} public methods of SDK {tinker.__version__} that reach a server, "
        f"{len(refusals) - num_refused} work and {num_refused} are refused.",
        "",
        "| client | work | refused |",
        "|---|---|---|",
    ]
    for kind in CLIENTS:
        cells = []
        for refused in (False, True):
            names = [n for (k, n), why in refusals.items() if k == kind and bool(why) == refused]
            lonely = [n for n in names if not (n.endswith("_async") and n.removesuffix("_async") in names)]
            cells.append(", ".join(f"`{n}(_async)`" if f"{n}_async" in names else f"`{n}`" for n in lonely) or "-")
        lines.append(f"| `{kind}` | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.filterwarnings("ignore")
def test_the_table_of_the_sdks_methods_is_what_happens(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_PROJECT_ID", "project")  # without one the SDK does not ask the server for a copy
    refusals = {}
    with tinker_server(tmp_path, "--max-models", "6", "--lora-rank", "4", start_s=200) as (url, _):
        world = World(url)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in CLIENTS:
                for method in methods(kind):
                    refusals[kind, method] = refusal(world, kind, method)
        world.service.close("success").result(30)
    for (kind, method), why in refusals.items():
        print(f"{kind}.{method}: {why or 'works'}")
    generated, page = table(refusals), PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    (tmp_path / "methods.md").write_text(generated)
    written = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert written == generated, f"{PAGE}: is out of date; put the text of {tmp_path / 'methods.md'} between its marks"
    # The server's sentence, but for whoami, of which the SDK says that a server with plain keys has no principals.
    assert not [why for why in refusals.values() if why and "not offered" not in why and "requires JWT auth" not in why]
