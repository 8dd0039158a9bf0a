"""Which versions of adapters there are: those that tenants publish, of which each tenant has a current one, and those that are pinned.

Decisions only, for `offbeat.fleet.adapters`. A published version is known until newer ones take its place; a pinned one until it is
unpinned, whatever else its tenant publishes, and it may also be published.
"""

from collections.abc import Collection

from offbeat.errors import PublishError, RefusedError
from offbeat.types import Version
from offbeat.weights.adapters import AdapterManifest, split_adapter_name


class Catalog:
    """Manifests by name, and each tenant's newest and current version."""

    def __init__(self, *, keep: int) -> None:
        """`keep` is how many of each tenant's newest versions stay when they are not in use."""
        self._keep = keep
        self._published: dict[str, AdapterManifest] = {}
        self._pinned: dict[str, AdapterManifest] = {}
        self._newest: dict[str, str] = {}
        self._current: dict[str, str] = {}

    @property
    def num_tenants(self) -> int:
        """Tenants that have published."""
        return len(self._newest)

    def get(self, name: str) -> AdapterManifest | None:
        """A version by its name."""
        return self._published.get(name) or self._pinned.get(name)

    def find(self, adapter: str) -> AdapterManifest:
        """A tenant's current version, or the version that `tenant@version` names.

        Raises:
            RefusedError: there is none.
        """
        manifest = self.get(self._current.get(adapter, adapter))
        if manifest is None:
            current = self._current.get(adapter.rpartition("@")[0])  # other tenants' names are no business of this one
            raise RefusedError(f"there is no adapter {adapter[:200]!r}; {f'{current} is current' if current else 'publish it first'}")
        return manifest

    def current(self, tenant: str) -> str | None:
        """The name of a tenant's current version."""
        return self._current.get(tenant)

    def newest(self) -> list[AdapterManifest]:
        """Each tenant's newest version."""
        return [manifest for name in self._newest.values() if (manifest := self.get(name))]

    def publish(self, manifest: AdapterManifest, *, pinned: bool = False) -> None:
        """Know a new version, and make it its tenant's newest.

        A pinned version may be an older one; its tenant's newest it becomes, if it is that, when an engine serves it.

        Raises:
            PublishError: it is not newer than the tenant's newest; as `pin`.
        """
        newest = self._newest.get(manifest.tenant)
        if pinned or manifest.name in self._pinned:
            self.pin(manifest)
            return
        if newest is not None and manifest.version <= version_of(newest):
            raise PublishError(
                f"{manifest.name} is not newer than {newest}; a version is published once, and a tenant's versions count up")
        self._published[manifest.name], self._newest[manifest.tenant] = manifest, manifest.name

    def serves(self, name: str) -> None:
        """An engine serves a version: it is current if it is the newest that one does; not if it has been forgotten meanwhile."""
        if self.get(name) is not None:
            tenant = tenant_of(name)
            for known in (self._current, self._newest):
                known[tenant] = max(known.get(tenant, name), name, key=version_of)

    def withdraw(self, name: str) -> None:
        """Forget a version that was not published after all, unless an engine serves it as current."""
        tenant = tenant_of(name)
        if self._current.get(tenant) == name:
            return
        self._published.pop(name, None)
        self._pinned.pop(name, None)
        if self._newest.get(tenant) == name:
            del self._newest[tenant]
            if tenant in self._current:
                self._newest[tenant] = self._current[tenant]

    def remove(self, tenant: str) -> None:
        """Forget what a tenant has published; what is pinned stays."""
        self._current.pop(tenant, None)
        self._newest.pop(tenant, None)
        self._published = {name: manifest for name, manifest in self._published.items() if manifest.tenant != tenant}

    def pin(self, manifest: AdapterManifest) -> None:
        """Know a version until it is unpinned; the same again is no change.

        Raises:
            PublishError: the name stands for another folder.
        """
        known = self.get(manifest.name)
        if known is not None and (known.folder, known.fingerprint) != (manifest.folder, manifest.fingerprint):
            raise PublishError(f"{manifest.name} is {known.folder} and cannot become {manifest.folder}; a version is immutable")
        self._pinned[manifest.name] = manifest

    def unpin(self, name: str) -> None:
        """Forget a version, also as its tenant's current one; an unknown name is no error."""
        if self._pinned.pop(name, None) is None:
            return
        self._published.pop(name, None)
        for known in (self._current, self._newest):
            if known.get(tenant_of(name)) == name:
                del known[tenant_of(name)]

    def may_go(self, name: str) -> bool:
        """Whether engines need not hold a version any more."""
        return name not in self._pinned and name != self._current.get(tenant_of(name))

    def prune(self, in_use: Collection[str]) -> list[str]:
        """Forget versions that are not among a tenant's newest, nor pinned, nor in use; gives their folders."""
        kept = {*in_use, *self._newest.values(), *self._current.values()}
        by_tenant: dict[str, list[str]] = {}
        for name in sorted(self._published, key=version_of):
            by_tenant.setdefault(self._published[name].tenant, []).append(name)
        old = [name for names in by_tenant.values() for name in names[: -self._keep] if name not in kept and name not in self._pinned]
        return [self._published.pop(name).folder for name in old]


def tenant_of(name: str) -> str:
    """The tenant of `tenant@version`."""
    return split_adapter_name(name)[0]


def version_of(name: str) -> Version:
    """The version of `tenant@version`."""
    return split_adapter_name(name)[1]
