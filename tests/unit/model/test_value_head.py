import torch

from torchtitan_rl.model.value_head import ValueHead


def test_values_of_a_model_in_bfloat16_are_float32():
    torch.manual_seed(0)
    head = ValueHead.Config(in_features=64, out_features=1, bias=False).build()
    weight, hidden = torch.randn(1, 64), torch.randn(1, 500, 64).bfloat16()
    with torch.no_grad():
        head.weight.copy_(weight)
    head = head.bfloat16()
    values = head(hidden)["predicted_values"]
    expected = (hidden.double() @ weight.bfloat16().double().T)[..., 0]
    assert values.dtype == torch.float32 and values.shape == (1, 500)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert (values != values.bfloat16().float()).float().mean() > 0.9
