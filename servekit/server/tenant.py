"""Whose request it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from servekit.config.tenants import TenantKey, TenantsConfig
from servekit.server.errors import ApiError, ErrorCode

TENANT = re.compile(r"[\x21-\x7e]{1,256}")
"""What a header may name; the field `user` is bounded by the body's type."""


def tenant_of(headers: Mapping[str, str], user: str | None, tenants: TenantsConfig) -> str:
    """The tenant that a request names where scheduler.tenants.key says; empty if it names none.

    Raises ApiError (400) for a name that cannot be one.
    """
    if tenants.key is TenantKey.user:
        return user or ""
    name = headers.get(tenants.header, "")
    if name and not TENANT.fullmatch(name):
        raise ApiError(ErrorCode.invalid_header, f"{tenants.header}: must be 1 to 256 visible ASCII characters")
    return name
