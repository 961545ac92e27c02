"""Credentials are masked, and common options of training commands stay readable."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.inject.masking import (
    MASK,
    mask_command,
    mask_environment,
    mask_text,
    mask_values,
)

SECRET_NAMES = [
    "api_key",
    "api-key",
    "apikey",
    "apiKey",
    "APIKey",
    "WANDB_API_KEY",
    "OPENAI_API_KEY_2",
    "HF_TOKEN",
    "hfToken",
    "token",
    "auth_token",
    "accessToken",
    "access_token",
    "AWS_SESSION_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "SECRET_KEY_BASE",
    "client_secret",
    "clientSecret",
    "password",
    "PASSWORD",
    "db.password",
    "PGPASSWORD",
    "MYSQL_PWD",
    "db-pass",
    "SSHPASS",
    "passphrase",
    "credentials",
    "Authorization",
    "auth",
    "oauth",
    "cookie",
    "private_key",
    "AccountKey",
    "model.api_key",
    "NEPTUNE_API_TOKEN",
    "COMET_API_KEY",
    "ssh-key",
]
IF_RANDOM = ["key", "s3_key", "session", "run_token", "TF_TOKEN_app_terraform_io"]
"""Names of many things: only random values are masked."""

HARMLESS = [
    ["--tokenizer", "gpt2"],
    ["--tokenizer=gpt2"],
    ["--tokenizer-name", "x"],
    ["--max-tokens", "512"],
    ["--max_tokens=512"],
    ["--num_tokens", "1e9"],
    ["--tokens", "300"],
    ["--train-tokens=4B"],
    ["--max-new-tokens", "64"],
    ["--tokens-per-batch", "4096"],
    ["--num-keys", "4"],
    ["--num_key_value_heads", "8"],
    ["--keyframes", "3"],
    ["--key-frames", "2"],
    ["--monkey", "x"],
    ["--image-key", "jpg"],
    ["--text_key=caption"],
    ["--sort-key", "length"],
    ["--author", "me"],
    ["--authors=me"],
    ["--pad-token", "<pad>"],
    ["--bos_token=<s>"],
    ["--mask-token", "[MASK]"],
    ["--use-auth-token", "true"],
    ["--no-auth", "train.py"],
    ["--secret-file", "/run/x"],
    ["--password-file=/run/x"],
    ["--compass", "north"],
    ["--bypass", "x"],
    ["--passes", "3"],
    ["--n-keys=2"],
    ["--loader", "basic", "training"],
    ["--backend", "hf_transformers"],
    ["--model", "sk-learn-style-model"],
    ["--lr", "0.1"],
    ["-n", "4"],
    ["python", "-u", "train.py"],
    ["s3://bucket/data/train.tar"],
    ["https://host:8080/a@b"],
    ["git@github.com:org/repo.git"],
    ["--opts", '{"lr": 0.1, "tokens": 512}'],
    ["trainer.max_tokens=512"],
    ["KeyError: 'x'"],
    ["KeyError: 'layer1.0.conv1.weight'"],
    ['create_model("vit_large_patch14_clip_224")'],
    ['load_dataset("wikitext-103-raw-v1-2024a")'],
    ["--session", "exp3_run2b"],
    ["--run-key", "run_2024_11_18_1530"],
    ["mysql --version; mkdir -pv logs1"],
]

TOKENS = [
    "hf_" + "aB3" * 11 + "x",
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2_" * 8,
    "glpat-" + "x7-" * 7,
    "sk-proj-" + "a1B2-" * 8,
    "sk-ant-api03-" + "Zz9_" * 8,
    "nvapi-" + "a1B2_" * 8,
    "AKIA" + "ABCD2345" * 2,
    "AIza" + "a1B2_" * 7,
    "xoxb-123456789012-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
]

secrets = st.text(string.ascii_letters + string.digits + "+/_.~!#%^*", min_size=6, max_size=40).map(
    lambda text: f"Q{text}7Z"
)
"""With letters and a digit, so that it is not a boolean, a number, a plain word or a mask."""
names = st.sampled_from(SECRET_NAMES)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names(name: str) -> None:
    assert mask_environment({name: "hunter2x"}) == {name: MASK}
    assert mask_command([f"--{name}", "hunter2x"]) == [f"--{name}", MASK]


@pytest.mark.parametrize("name", IF_RANDOM)
def test_values_of_common_names_are_masked_if_they_look_random(name: str) -> None:
    for value, masked in (("q8Zr2mXw51Lk", MASK), ("image/train-01", "image/train-01")):
        assert mask_environment({name: value}) == {name: masked}
        assert mask_command([f"--{name}", value]) == [f"--{name}", masked]


@pytest.mark.parametrize("command", HARMLESS, ids=" ".join)
def test_harmless_commands_stay_readable(command: list[str]) -> None:
    assert mask_command(command) == command
    for word in command:
        assert mask_text(word) == word


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("frame", ["{}", "--x={}", "x_{}", "login('{}')", "see {}, then", "a:{}/b"])
def test_tokens_of_known_formats_are_masked(token: str, frame: str) -> None:
    assert token not in mask_text(frame.format(token))
    assert mask_text(frame.format(token)).startswith(frame.partition("{")[0])


@pytest.mark.parametrize(
    ("command", "masked"),
    [
        (["--api-key", "X"], ["--api-key", MASK]),
        (["--api_key=X"], [f"--api_key={MASK}"]),
        (["--password", "1234"], ["--password", MASK]),
        (["--pass", "tr0ub4dor"], ["--pass", MASK]),
        (["--password", "two words"], ["--password", MASK]),
        (["--password=two words"], [f"--password={MASK}"]),
        (["--token", "-Xy93-abcdef"], ["--token", MASK]),
        (["--token", "--lr", "3"], ["--token", "--lr", "3"]),
        (["--token", "-n", "3"], ["--token", "-n", "3"]),
        (["env", "WANDB_API_KEY=X", "python"], ["env", f"WANDB_API_KEY={MASK}", "python"]),
        (["--export=ALL,HF_TOKEN=X"], [f"--export=ALL,HF_TOKEN={MASK}"]),
        (["+logger.apiKey=X"], [f"+logger.apiKey={MASK}"]),
        (["-H", "Authorization: Bearer X"], ["-H", f"Authorization: {MASK}"]),
        (["--tokens", "q8Zr2mXw51Lk,hT4nV0pGq"], ["--tokens", MASK]),
        (
            ["bash", "-c", "TOKEN=X python a.py --lr 1"],
            ["bash", "-c", f"TOKEN={MASK} python a.py --lr 1"],
        ),
        (
            ["ssh", "host", "TOKEN=X python a.py --lr 1"],
            ["ssh", "host", f"TOKEN={MASK} python a.py --lr 1"],
        ),
        (["curl", "-u", "me:X", "host"], ["curl", "-u", f"me:{MASK}", "host"]),
        (
            ["aws", "configure", "set", "secret_key", "X"],
            ["aws", "configure", "set", "secret_key", MASK],
        ),
    ],
)
def test_commands(command: list[str], masked: list[str]) -> None:
    assert mask_command(command) == masked


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pw@host/x", f"https://{MASK}@host/x"),
        ("https://user:p@w@host/x", f"https://{MASK}@host/x"),
        ("https://q8Zr2mXw51Lk@host/x", f"https://{MASK}@host/x"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("postgres://u:p@h/db?password=x", f"postgres://{MASK}@h/db?password={MASK}"),
        ("https://h/x?sig=abc1%2F&se=1", f"https://h/x?sig={MASK}&se=1"),
        ("https://h/x?X-Amz-Signature=a1b2c3", f"https://h/x?X-Amz-Signature={MASK}"),
        ("Authorization: Basic dXNlcg==", f"Authorization: {MASK}"),
        ("curl with Bearer abcdefgh.123", f"curl with Bearer {MASK}"),
        ('{"token": "abc", "lr": 0.1}', f'{{"token": "{MASK}", "lr": 0.1}}'),
        ("{'api_key':'a b','lr':1}", f"{{'api_key':'{MASK}','lr':1}}"),
        ('{\\"token\\": \\"abc\\"}', f'{{\\"token\\": \\"{MASK}\\"}}'),
        ('os.environ["HF_TOKEN"] = "abc"', f'os.environ["HF_TOKEN"] = "{MASK}"'),
        ("login(token='abc', new=True)", f"login(token='{MASK}', new=True)"),
        ("note: password=abc", f"note: password={MASK}"),
        ("api_key := abc", f"api_key := {MASK}"),
        ("AccountName=x;AccountKey=ab==", f"AccountName=x;AccountKey={MASK}"),
        ("password='never closed", f"password='{MASK}"),
        ("token:\nnext line", "token:\nnext line"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", MASK),
    ],
)
def test_texts(text: str, masked: str) -> None:
    assert mask_text(text) == masked


def test_long_values_are_masked_completely() -> None:
    value = "x7" * 50_000
    assert mask_text(f"password='{value}' lr=1") == f"password='{MASK}' lr=1"
    assert mask_command([f"--password={value}"]) == [f"--password={MASK}"]


def test_values_of_records() -> None:
    """Our own records have keys such as `key`, whose values are not credentials."""
    record = {
        "trial": {"study": {"key": "a2a6b52aa70e", "settings": {"batch_size": 8}}},
        "command": ["train", "--api-key", "X"],
        "credentials": {"value": "q8Zr2mXw51Lk"},
        "api_key": ["X"],
        "problems": {"failed: token=X": 2},
    }
    assert mask_values(record) == {
        **record,
        "command": ["train", "--api-key", MASK],
        "credentials": {"value": MASK},
        "api_key": [MASK],
        "problems": {f"failed: token={MASK}": 2},
    }


@given(names, secrets)
def test_named_secrets_are_masked_in_every_form(name: str, secret: str) -> None:
    for text in (
        f"{name}={secret}",
        f"{name}: {secret}",
        f"--{name}={secret}",
        f"x {name} = '{secret}' y",
        json.dumps({name: secret, "lr": 1}),
        json.dumps({"a": {name: secret}}),
        repr({name: secret}),
        f"run --env=A={name}={secret}",
    ):
        assert secret not in mask_text(text)
    for command in ([f"--{name}", secret], [f"--{name}={secret}"], ["-x", f"{name}={secret}"]):
        assert all(secret not in word for word in mask_command(command))
    assert secret not in mask_environment({name: secret})[name]


@given(secrets.filter(lambda secret: "/" not in secret), st.sampled_from(["https", "git+ssh"]))
def test_passwords_of_urls_are_masked(secret: str, scheme: str) -> None:
    masked = mask_text(f"clone {scheme}://me:{secret}@host.example/a/b.git now")
    assert secret not in masked
    assert masked.endswith("@host.example/a/b.git now")


@given(st.text())
def test_masking_is_idempotent(text: str) -> None:
    assert mask_text(mask_text(text)) == mask_text(text)


pieces = st.sampled_from(
    ["token", "password", "key", "=", ":", " ", '"', "'", "***", "://", "@", "\\", "-", "a", "\n"]
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_masking_is_idempotent_for_texts_like_secrets(text: str) -> None:
    assert mask_text(mask_text(text)) == mask_text(text)


@given(st.lists(st.text(), max_size=6))
def test_command_keeps_its_number_of_words(command: list[str]) -> None:
    assert len(mask_command(command)) == len(command)


@given(st.sampled_from(["max_tokens", "num-tokens", "tokens", "num_keys"]), st.integers(0, 10**12))
def test_counts_stay_readable(name: str, count: int) -> None:
    assert mask_command([f"--{name}", str(count)]) == [f"--{name}", str(count)]
    assert mask_text(f"{name}={count}") == f"{name}={count}"
