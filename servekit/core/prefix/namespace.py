"""Who may share cached prefixes with whom."""

from __future__ import annotations

from servekit.config.prefix_cache import CacheNamespace
from servekit.core.request import Request

Names = tuple[str, ...]


def namespace_of(request: Request, namespace: CacheNamespace) -> Names:
    """The names that requests must have in common to share prefixes."""
    match namespace:
        case CacheNamespace.salt:
            return (request.spec.cache_salt,)
        case CacheNamespace.tenant:
            return (request.tenant, request.spec.cache_salt)
