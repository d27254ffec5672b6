"""Verifiers: the published vectors, hostile input, secrets that cannot be meant, clocks."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import standardwebhooks.webhooks
from hypothesis import example, given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from idempotency.exceptions import ConfigurationError
from idempotency.webhooks import (
    BadSignature,
    HmacVerifier,
    StandardWebhooksVerifier,
    StripeVerifier,
    github,
    shopify,
)

Verifier = Callable[[bytes, Mapping[str, str]], None]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
NOW = 1_614_265_330
BODY = b'{"test": 2432232314}'
HEADERS = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": str(NOW),
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}


def clock() -> float:
    return float(NOW)


def accepts(verify: Verifier, body: bytes = BODY, headers: Mapping[str, str] = HEADERS) -> bool:
    try:
        verify(body, headers)
    except BadSignature:
        return False
    return True


def standard(secrets: Any = SECRET, **options: Any) -> StandardWebhooksVerifier:
    options.setdefault("clock", clock)
    return StandardWebhooksVerifier(secrets, **options)


def stripe_headers(secret: str, body: bytes, timestamp: int = NOW) -> dict[str, str]:
    signed = f"{timestamp}.".encode() + body
    signature = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    return {"Stripe-Signature": f"t={timestamp},v1={signature},v0=something"}


# The published vectors ---------------------------------------------------------------------------


def test_the_published_vector_of_standard_webhooks() -> None:
    """RULES 111."""
    assert accepts(standard())
    assert not accepts(standard(), BODY + b" ")
    for name in HEADERS:
        assert not accepts(standard(), headers=HEADERS | {name: ""})
        assert not accepts(standard(), headers=HEADERS | {name: HEADERS[name] + "0"})


def test_the_published_vector_of_github() -> None:
    """RULES 111."""
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    verify = github("It's a Secret to Everybody")
    assert accepts(verify, b"Hello, World!", {"X-Hub-Signature-256": signature})
    assert not accepts(verify, b"Hello, World?", {"X-Hub-Signature-256": signature})
    assert not accepts(verify, b"Hello, World!", {"X-Hub-Signature-256": signature[:-2]})
    without_prefix = signature.removeprefix("sha256=")
    assert not accepts(verify, b"Hello, World!", {"X-Hub-Signature-256": without_prefix})


def test_a_signature_of_shopify() -> None:
    digest = hmac.new(b"hush", BODY, hashlib.sha256).digest()
    headers = {"X-Shopify-Hmac-Sha256": base64.b64encode(digest).decode()}
    assert accepts(shopify("hush"), BODY, headers)
    assert not accepts(shopify("hush!"), BODY, headers)


def test_a_signature_of_stripe() -> None:
    verify = StripeVerifier(["whsec_new", "whsec_old"], clock=clock)
    assert accepts(verify, BODY, stripe_headers("whsec_old", BODY))
    assert not accepts(verify, BODY + b"\n", stripe_headers("whsec_old", BODY))
    assert not accepts(verify, BODY, stripe_headers("whsec_other", BODY))
    given = stripe_headers("whsec_new", BODY)["Stripe-Signature"]
    for broken in (f"{given},t={NOW}", f"t={NOW + 1},{given}", given.replace("t=", "T="), ""):
        assert not accepts(verify, BODY, {"Stripe-Signature": broken})
    # The scheme v0 is not a signature of ours, whatever it says.
    assert not accepts(verify, BODY, {"Stripe-Signature": given.replace("v1=", "v0=")})
    assert accepts(verify, BODY, {"Stripe-Signature": given.replace("v1=", "v1=00,v1=")})


@pytest.mark.parametrize("encoding", ["hex", "base64"])
@pytest.mark.parametrize("algorithm", ["sha1", "sha256", "sha512"])
def test_a_generic_hmac(algorithm: str, encoding: Any) -> None:
    digest = hmac.new(b"k", BODY, algorithm).digest()
    text = digest.hex() if encoding == "hex" else base64.b64encode(digest).decode()
    verify = HmacVerifier("k", header="X-Sig", algorithm=algorithm, prefix="v=", encoding=encoding)
    assert accepts(verify, BODY, {"X-Sig": f"v={text}"})
    assert not accepts(verify, BODY, {"X-Sig": text})
    assert not accepts(verify, BODY, {"X-Sig": "v="})
    assert not accepts(verify, BODY, {})


# The bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{ "a" : 1.0,"b":\t1, "c": "\\u00e9\\/" }\r\n',
        b"a=1&b=%C3%A9+%20",
        "Grüße".encode("latin-1"),
        b"\xff\xfe\x00",
        b"",
    ],
    ids=["odd JSON", "form", "Latin-1", "binary", "empty"],
)
def test_the_exact_bytes_are_verified(body: bytes) -> None:
    """BUGS Q01, Q07, Q10: nothing is decoded or written again before the comparison."""
    raw = base64.b64decode(SECRET.removeprefix("whsec_"))
    signed = f"m.{NOW}.".encode() + body
    signature = base64.b64encode(hmac.new(raw, signed, hashlib.sha256).digest()).decode()
    headers = {"webhook-id": "m", "webhook-timestamp": str(NOW)}
    assert accepts(standard(), body, headers | {"webhook-signature": f"v1,{signature}"})
    assert not accepts(standard(), body + b" ", headers | {"webhook-signature": f"v1,{signature}"})


def test_an_id_that_is_not_ascii_is_verified_as_it_was_sent() -> None:
    """Django decodes header bytes as Latin-1; the sender signed the bytes."""
    sent = "mémo".encode()
    raw = base64.b64decode(SECRET.removeprefix("whsec_"))
    signed = sent + f".{NOW}.".encode() + BODY
    signature = base64.b64encode(hmac.new(raw, signed, hashlib.sha256).digest()).decode()
    headers = {
        "webhook-id": sent.decode("latin-1"),
        "webhook-timestamp": str(NOW),
        "webhook-signature": f"v1,{signature}",
    }
    assert accepts(standard(), BODY, headers)
    assert not accepts(standard(), BODY, headers | {"webhook-id": "\u20ac"})


@pytest.mark.parametrize("case", [str.lower, str.upper, str.title])
def test_header_names_may_be_in_any_case(case: Callable[[str], str]) -> None:
    """BUGS Q12: in a plain dict too."""
    assert accepts(standard(), headers={case(name): value for name, value in HEADERS.items()})
    headers = {case(k): v for k, v in stripe_headers("s", BODY).items()}
    assert accepts(StripeVerifier("s", clock=clock), BODY, headers)


def test_svix_names_its_headers_differently() -> None:
    headers = {name.replace("webhook-", "svix-"): value for name, value in HEADERS.items()}
    verify = standard(prefix="svix-")
    assert verify.delivery_id == "header:svix-id"
    assert accepts(verify, headers=headers)
    assert not accepts(verify, headers=HEADERS)


# Secrets -----------------------------------------------------------------------------------------


def test_any_of_several_secrets_verifies() -> None:
    """BUGS Q08: rotation, also of raw keys beside written ones."""
    raw = base64.b64decode(SECRET.removeprefix("whsec_"))
    assert accepts(standard([OTHER, SECRET]))
    assert accepts(standard([OTHER, raw]))
    assert accepts(standard(secret for secret in (SECRET, OTHER)))
    assert not accepts(standard(OTHER))


def test_any_of_several_signatures_is_enough() -> None:
    """RULES 111: a list in the header; unknown versions and broken tokens are passed over."""
    good = HEADERS["webhook-signature"]
    other = "v1," + base64.b64encode(bytes(32)).decode()
    for signatures in (
        f"{other} {good}",
        f"{good} {other}",
        f"v1a,{good.removeprefix('v1,')} garbage , v1, v1,? v1,é  {good}",
    ):
        assert accepts(standard(), headers=HEADERS | {"webhook-signature": signatures})
    for signatures in (other, f"v1a,{good.removeprefix('v1,')}", good.removeprefix("v1,"), " "):
        assert not accepts(standard(), headers=HEADERS | {"webhook-signature": signatures})


@pytest.mark.parametrize(
    "secrets",
    [
        None,
        "",
        b"",
        [],
        [SECRET, ""],
        [SECRET, None],
        7,
        SECRET.removeprefix("whsec_"),
        "whsec_",
        "whsec_not base64!",
        f"{SECRET}\n",
        SECRET.encode(),
    ],
)
def test_a_malformed_secret_is_a_configuration_error(secrets: Any) -> None:
    """BUGS Q06: said when the verifier is made, not as a 401 to somebody else."""
    with pytest.raises(ConfigurationError) as raised:
        StandardWebhooksVerifier(secrets)
    assert "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw" not in str(raised.value)


@pytest.mark.parametrize("secrets", [None, "", [], ["s", b""], "secret\n", " secret"])
@pytest.mark.parametrize("make", [StripeVerifier, github, shopify])
def test_a_malformed_text_secret_is_a_configuration_error(make: Any, secrets: Any) -> None:
    """BUGS Q06."""
    with pytest.raises(ConfigurationError):
        make(secrets)


def test_white_space_may_be_part_of_a_secret_of_bytes() -> None:
    signature = hmac.new(b" s\n", BODY, hashlib.sha256).hexdigest()
    assert accepts(HmacVerifier(b" s\n", header="S"), BODY, {"S": signature})


@pytest.mark.parametrize(
    "options", [{"algorithm": "rot13"}, {"algorithm": "shake_128"}, {"encoding": "utf-8"}]
)
def test_an_unusable_hmac_is_a_configuration_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        HmacVerifier("s", header="S", **options)


# Time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tolerance", "off", "accepted"),
    [
        (300, 300, True),
        (300, 301, False),
        (timedelta(minutes=5), 300, True),
        (timedelta(minutes=5), 301, False),
        (0, 0, True),
        (0, 1, False),
        (None, 10 * 365 * 86400, True),
    ],
)
def test_tolerance_counts_both_ways(tolerance: Any, off: int, accepted: bool) -> None:
    """BUGS Q04, Q05: configurable; 0 is the same second, None is any time."""
    for now in (NOW + off, NOW - off):
        # A clock has fractions, a timestamp has none: 0 must be possible.
        late = now + 0.9
        verify = standard(tolerance=tolerance, clock=lambda late=late: late)
        assert accepts(verify) is accepted
        stripe = StripeVerifier("s", tolerance=tolerance, clock=lambda late=late: late)
        assert accepts(stripe, BODY, stripe_headers("s", BODY)) is accepted


def test_five_minutes_by_the_real_clock_are_the_default() -> None:
    """BUGS Q05."""
    assert not accepts(StandardWebhooksVerifier(SECRET))
    assert not accepts(StripeVerifier("s"), BODY, stripe_headers("s", BODY))
    now = datetime.now(UTC)
    for age, accepted in ((280, True), (320, False), (-280, True), (-320, False)):
        sent = now - timedelta(seconds=age)
        headers = {
            "webhook-id": "m",
            "webhook-timestamp": str(int(sent.timestamp())),
            "webhook-signature": Webhook(SECRET).sign("m", sent, BODY.decode()),
        }
        assert accepts(StandardWebhooksVerifier(SECRET), headers=headers) is accepted


@pytest.mark.parametrize("tolerance", [-1, float("nan"), timedelta(seconds=-1)])
def test_a_tolerance_that_makes_no_sense_is_a_configuration_error(tolerance: Any) -> None:
    with pytest.raises(ConfigurationError):
        standard(tolerance=tolerance)


@pytest.mark.parametrize(
    "timestamp",
    [
        "-1",
        "1e9",
        "1614265330.5",
        " 1614265330",
        "\u0661",
        "\u00b2",
        "9" * 13,
        "9" * 5000,
        "nan",
        "",
    ],
)
def test_a_timestamp_is_a_plain_number(timestamp: str) -> None:
    """Although the signature is right, and any age is."""
    headers = signed_at(timestamp)
    assert not accepts(standard(tolerance=None), headers=headers)
    assert not accepts(StripeVerifier("s", tolerance=None), headers=headers)


def test_a_signature_without_an_id_is_none() -> None:
    assert accepts(standard(), headers=signed_at(str(NOW)))
    assert not accepts(standard(), headers=signed_at(str(NOW), delivery=""))


def signed_at(timestamp: str, delivery: str = "m") -> dict[str, str]:
    """Headers of Standard Webhooks and of Stripe that are right for this timestamp."""
    raw = base64.b64decode(SECRET.removeprefix("whsec_"))
    signed = f"{delivery}.{timestamp}.".encode("latin-1", "replace") + BODY
    signature = base64.b64encode(hmac.new(raw, signed, hashlib.sha256).digest()).decode()
    stripe = hmac.new(b"s", f"{timestamp}.".encode() + BODY, hashlib.sha256).hexdigest()
    return {
        "webhook-id": delivery,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{signature}",
        "Stripe-Signature": f"t={timestamp},v1={stripe}",
    }


# Hostile input -----------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ["v1,", "v1,=", "garbage", "sha256=", "sha256=zz", "t=1", f"t={NOW},v1=é", "t=,v1=", "="]
    ),
)
VERIFIERS: list[Verifier] = [
    standard(),
    standard(tolerance=None),
    StripeVerifier("s", tolerance=None),
    StripeVerifier("s", clock=clock),
    github("s"),
    shopify("s"),
]


@given(
    body=st.binary(max_size=100),
    values=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            (*HEADERS, "Stripe-Signature", "X-Hub-Signature-256", "X-Shopify-Hmac-Sha256"), TEXTS
        ),
    ),
    has_time=st.booleans(),
)
@example(body=b"\xff", values={**HEADERS, "webhook-signature": "garbage"}, has_time=True)
@example(body=b"", values={}, has_time=False)
@example(body=b"", values={"Stripe-Signature": "t=1,v1=\u0661\u0661"}, has_time=False)
def test_hostile_input_is_refused_and_nothing_else(
    body: bytes, values: dict[str, str], has_time: bool
) -> None:
    """BUGS Q11 and ECOSYSTEM trap 6: BadSignature, never another exception, never accepted."""
    headers = values | ({"webhook-timestamp": str(NOW)} if has_time else {})
    for verify in VERIFIERS:
        with pytest.raises(BadSignature):
            verify(body, headers)


# Agreement with the reference implementation -----------------------------------------------------


class Frozen(datetime):
    """The reference implementation's clock."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.fromtimestamp(NOW, tz)


SECRETS = st.binary(min_size=1, max_size=64).map(
    lambda raw: "whsec_" + base64.b64encode(raw).decode()
)
IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@given(
    secret=SECRETS,
    other=SECRETS,
    delivery=IDS,
    body=st.text(max_size=60),
    off=st.integers(-400, 400),
    data=st.data(),
)
def test_it_agrees_with_the_reference_implementation(
    secret: str, other: str, delivery: str, body: str, off: int, data: st.DataObject
) -> None:
    """Whatever is signed, by whichever key, touched or not: both accept, or both refuse.

    Bodies are UTF-8 and tokens well-formed here, because elsewhere the reference raises errors of its
    own (ECOSYSTEM trap 6).
    """
    body = body.encode("utf-8", "replace").decode()
    sent = datetime.fromtimestamp(NOW + off, UTC)
    tokens = [
        data.draw(
            st.sampled_from(
                [
                    Webhook(secret).sign(delivery, sent, body),
                    Webhook(other).sign(delivery, sent, body),
                    Webhook(secret).sign(delivery, sent, body + "x"),
                    Webhook(secret).sign(delivery + "x", sent, body),
                    "v1a," + Webhook(secret).sign(delivery, sent, body).removeprefix("v1,"),
                    "v1,AAAA",
                ]
            ),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    headers = {
        "webhook-id": delivery,
        "webhook-timestamp": str(NOW + off),
        "webhook-signature": " ".join(tokens),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standardwebhooks.webhooks, "datetime", Frozen)
        reference = False
        with suppress(WebhookVerificationError):
            Webhook(secret).verify(body, headers, json_parse=False)
            reference = True
    assert accepts(standard(secret), body.encode(), headers) is reference


def test_the_agreement_is_about_acceptance_too() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standardwebhooks.webhooks, "datetime", Frozen)
        Webhook(SECRET).verify(BODY, HEADERS)
