"""What a server says of itself."""

import pytest

from tests.unit.serve.tinker.test_places import a_server
from torchtitan_rl.serve.tinker.catalogue import Catalogue
from torchtitan_rl.serve.tinker.faults import Fault


@pytest.mark.parametrize("sampled, trained", [(64, 256), (4096, 256), (64, 64)])
async def test_the_context_is_what_both_the_sampler_and_the_trainer_take(tmp_path, sampled, trained):
    server = a_server(tmp_path)
    server.served.context_tokens, server.served.trained_tokens = sampled, trained
    models = (await Catalogue(server.service("")).capabilities(None))["supported_models"]
    assert models[0]["max_context_length"] == min(sampled, trained)


@pytest.mark.parametrize("verb", ["publish", "unpublish"])
async def test_publishing_is_refused_in_its_own_words(tmp_path, verb):
    with pytest.raises(Fault, match=f"^{verb}: is not offered"):
        await getattr(Catalogue(a_server(tmp_path).service("")), verb)(None)
