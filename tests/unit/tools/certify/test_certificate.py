"""The certificate: its lines, its file, and what `train` says of a model without one."""

import json
import math
import shlex

import pytest

from torchtitan_rl.tools.certify.certificate import FILE, Certificate, CertificateLine, missing_certificate, text_hash

CHECKS = (
    CertificateLine(name="log-probabilities", difference=3e-6, tolerance=2e-5, part="40 tokens"),
    CertificateLine(name="gradients", difference=0.3, tolerance=1e-4, part="layers.0.attention.qkv_linear.wq.bias"),
    CertificateLine(name="layouts", difference=None, note="not run: a line above is broken"),
)


def certificate(checks, config="{}"):
    return Certificate(
        family="qwen2",
        model="m",
        config_sha256=text_hash(config),
        checks=checks,
        seconds=1.0,
        made="2026-01-01T00:00:00",
        versions={"torch": "2"},
    )


def test_a_line_is_broken_above_its_tolerance_and_by_what_is_no_number():
    assert not CertificateLine(name="n", difference=1e-4, tolerance=1e-4).broken
    assert CertificateLine(name="n", difference=1.1e-4, tolerance=1e-4).broken
    assert CertificateLine(name="n", difference=math.nan, tolerance=1e-4).broken
    assert CertificateLine(name="n", difference=math.inf, tolerance=1e-4).broken
    assert not CertificateLine(name="n", difference=None).broken


def test_the_first_broken_line_names_part_and_numbers():
    broken = certificate(CHECKS).broken
    assert broken.line == "gradients: layers.0.attention.qkv_linear.wq.bias: differs by 3.0e-01, 0.0001 is allowed"
    missing = CertificateLine(name="weights", difference=math.inf, part="lm_head.weight", note="is missing")
    assert missing.line == "weights: lm_head.weight: is missing"


def test_the_table_has_a_row_for_every_line():
    header, *rows = certificate(CHECKS).table().splitlines()
    assert header.split() == ["check", "largest", "difference", "tolerance", "ok", "where,", "or", "why", "not"]
    assert [row.split("  ")[0] for row in rows] == [check.name for check in CHECKS]
    assert " yes " in rows[0] and " NO " in rows[1] and rows[2].endswith("a line above is broken")


def test_the_file_says_all_and_is_json_also_with_infinite_differences(tmp_path):
    checks = (*CHECKS, CertificateLine(name="weights", difference=math.inf, part="p"))
    data = json.loads(certificate(checks).write(tmp_path / "new").read_text())
    assert (data["ok"], data["family"], data["versions"]) == (False, "qwen2", {"torch": "2"})
    assert [check["ok"] for check in data["checks"]] == [True, False, None, False]
    assert data["checks"][3]["difference"] == "inf" and data["made"]


def test_train_says_what_a_directory_lacks(tmp_path):
    assert missing_certificate(tmp_path) == ""  # no model: a tokenizer alone
    (tmp_path / "config.json").write_text("{}")
    assert "has no certificate.json; `torchtitan-rl certify" in missing_certificate(tmp_path)
    certificate(CHECKS[:1]).write(tmp_path)
    assert missing_certificate(tmp_path) == ""
    certificate(CHECKS).write(tmp_path)
    assert "has a broken line" in missing_certificate(tmp_path)
    certificate(CHECKS[:1], config="other").write(tmp_path)
    assert "is of another config.json" in missing_certificate(tmp_path)


def test_the_command_that_makes_a_certificate_can_be_pasted(tmp_path):
    directory = tmp_path / "it's mine"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    command = missing_certificate(directory).split("`")[1]
    assert shlex.split(command) == ["torchtitan-rl", "certify", str(directory)]


@pytest.mark.parametrize("text", ["[]", "{", '{"ok": true}'])
def test_a_certificate_that_is_none_is_said(tmp_path, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / FILE).write_text(text)
    assert "cannot be read" in missing_certificate(tmp_path)
