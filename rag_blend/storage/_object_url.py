"""What the URL of an object store says."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

_CLOUDS = {"s3": "s3", "s3a": "s3", "gs": "gs", **dict.fromkeys(("az", "azure", "adl", "abfs", "abfss"), "az")}
_SETTINGS = {  # what we call it, and what obstore does
    "s3": {"endpoint": "endpoint", "region": "region"},
    "gs": {"endpoint": "base_url"},
    "az": {"endpoint": "endpoint"},
}
_DEADLINES = ("deadline_s", "write_deadline_s")
_SECRET = re.compile(r"key|secret|token|passw|sas|sig|cred", re.IGNORECASE)
_EXAMPLE = "s3://BUCKET/PREFIX?endpoint=https://HOST:PORT&region=REGION&deadline_s=1.0&write_deadline_s=30"


class ObjectUrl(NamedTuple):
    """A URL, taken apart.

    Attributes:
        bucket: Scheme and bucket or container, e.g. ``s3://chunks``: can be shown to anybody.
        prefix: Of the names of all objects.
        settings: For obstore.
        deadlines: ``deadline_s`` and ``write_deadline_s``, in seconds, if they are given.
    """

    bucket: str
    prefix: str
    settings: dict[str, str]
    deadlines: dict[str, float]

    @classmethod
    def parse(cls, url: str) -> ObjectUrl:
        """Take a URL apart.

        Raises:
            ValueError: It is of no use, or contains credentials. Those are not shown.
        """
        try:
            parts = urlsplit(url)
        except ValueError:  # its text shows what may be a password
            raise ValueError(f"not a URL: use {_EXAMPLE}") from None
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        _refuse_credentials(parts.netloc, options)
        cloud = _CLOUDS.get(parts.scheme)
        if cloud is None or not parts.netloc or parts.fragment:
            raise ValueError(f"not the URL of an object store: use {_EXAMPLE}, gs://BUCKET/… or az://CONTAINER/…")
        names = _SETTINGS[cloud]
        unknown = sorted(options.keys() - names.keys() - set(_DEADLINES))
        if unknown:
            raise ValueError(f"{parts.scheme}:// takes no {', '.join(unknown)}: use {_EXAMPLE}")
        return cls(
            f"{parts.scheme}://{parts.netloc}",
            parts.path.strip("/"),
            {names[name]: value for name, value in options.items() if name in names},
            {name: _seconds(name, options[name]) for name in _DEADLINES if name in options},
        )


def _refuse_credentials(netloc: str, options: dict[str, str]) -> None:
    user, at, _ = netloc.rpartition("@")  # abfss://CONTAINER@ACCOUNT… has no colon there
    names = [name for name in options if name != "endpoint" and _SECRET.search(name)]
    if (at and ":" in user) or "@" in options.get("endpoint", "") or names:
        raise ValueError(
            "a URL ends up in logs, so it takes no credentials: put them into the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY)"
        )


def _seconds(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}={value} is not a number of seconds: use {_EXAMPLE}") from None
