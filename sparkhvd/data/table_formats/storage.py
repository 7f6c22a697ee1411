"""Translate storage options between pyarrow's names for stores and deltalake's or pyiceberg's.

A user gives the options once, as for `Store.create`. An Iceberg catalog may have its own options, which are translated
to a store's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkhvd.data.store import addresses
from sparkhvd.errors import InvalidArgumentError

# Scheme -> (name in a store, name in deltalake, name in pyiceberg).
_NAMES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "s3": (
        ("access_key", "AWS_ACCESS_KEY_ID", "s3.access-key-id"),
        ("secret_key", "AWS_SECRET_ACCESS_KEY", "s3.secret-access-key"),
        ("session_token", "AWS_SESSION_TOKEN", "s3.session-token"),
        ("region", "AWS_REGION", "s3.region"),
        ("endpoint_override", "AWS_ENDPOINT_URL", "s3.endpoint"),
        ("anonymous", "AWS_SKIP_SIGNATURE", "s3.anonymous"),
        ("role_arn", "AWS_IAM_ROLE_ARN", "s3.role-arn"),
        ("session_name", "AWS_IAM_ROLE_SESSION_NAME", "s3.role-session-name"),
    ),
    "abfs": (
        ("account_name", "AZURE_STORAGE_ACCOUNT_NAME", "adls.account-name"),
        ("account_key", "AZURE_STORAGE_ACCOUNT_KEY", "adls.account-key"),
        ("sas_token", "AZURE_STORAGE_SAS_TOKEN", "adls.sas-token"),
    ),
    "gs": (("access_token", "", "gcs.oauth2.token"), ("anonymous", "GOOGLE_SKIP_SIGNATURE", "")),
}
_NAMES["abfss"] = _NAMES["abfs"]


def for_delta(url: str, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Translate a store's options to deltalake's names.

    Raises:
        InvalidArgumentError: deltalake has no such option.
    """
    found = _translated(url, options, 1, "deltalake")
    if found.get("AWS_ENDPOINT_URL", "").startswith("http:"):
        found["AWS_ALLOW_HTTP"] = "true"
    return found


def for_iceberg(url: str, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Translate a store's options to pyiceberg's names. Errors are as in `for_delta`."""
    return _translated(url, options, 2, "pyiceberg")


def _translated(
    url: str, options: Mapping[str, Any] | None, at: int, library: str
) -> dict[str, str]:
    scheme = addresses.parse(url).scheme if "://" in url else "file"
    given = dict(options or {})
    if scheme in _NAMES:
        given = {**addresses.url_options(scheme, url), **given}
    protocol = given.pop("scheme", "https")
    endpoint = given.get("endpoint_override")
    if endpoint and "://" not in str(endpoint):
        given["endpoint_override"] = f"{protocol}://{endpoint}"
    names = {row[0]: row[at] for row in _NAMES.get(scheme, ())}
    unknown = [name for name in given if not names.get(name)]
    if unknown:
        raise InvalidArgumentError(
            f"fit_on_table: {library} has no storage option {unknown[0]!r} for {scheme!r}. Supported are "
            f"{', '.join(n for n, theirs in names.items() if theirs) or 'no options'}; other options can be set in the environment."
        )
    return {
        names[name]: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in given.items()
    }


def secrets(url: str, options: Mapping[str, Any] | None = None) -> frozenset[str]:
    """Collect passwords and keys of a URL, options or catalog, to keep them out of messages."""
    found = set(addresses.secrets_of(url, options or {}))
    for value in map(str, (options or {}).values()):
        if "://" in value:
            found |= addresses.secrets_of(value, {})
    # The property "credential" of a REST catalog is "user:password".
    found |= {str((options or {}).get("credential", "")).partition(":")[2]} - {""}
    # An address of a catalog without "://" cannot be parsed, so all of it counts as a secret.
    place = str((options or {}).get("uri", ""))
    return frozenset(found | ({place} if place and "://" not in place else set()))


def of_iceberg(url: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a catalog's file options to options of a store."""
    scheme = addresses.parse(url).scheme if "://" in url else "file"
    found: dict[str, Any] = {}
    for ours, _, theirs in _NAMES.get(scheme, ()):
        if theirs and (value := properties.get(theirs)) is not None:
            found[ours] = value
    if "anonymous" in found:
        found["anonymous"] = str(found["anonymous"]).lower() == "true"
    if (endpoint := found.get("endpoint_override")) and "://" in endpoint:
        found["scheme"], _, found["endpoint_override"] = endpoint.partition("://")
    return found
