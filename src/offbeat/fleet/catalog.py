"""Catalog of the versions of adapters: published versions, one of which is its adapter's current one, and pinned versions.

It only decides; `adapters` and `publishers` act. A published version, such as "coder@7", is known until newer ones take its place. A pinned
version is known until it is unpinned, regardless of other versions, and it may also be published.
"""

from collections.abc import Collection

from offbeat.errors import PublishError, RefusedError
from offbeat.types import Version
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Manifest


class Catalog:
    """Manifests by name, and each adapter's newest and current version."""

    def __init__(self, *, keep: int) -> None:
        """`keep` is the number of each adapter's newest versions that stay when they are not in use."""
        self._keep = keep
        self._published: dict[str, Manifest] = {}
        self._pinned: dict[str, Manifest] = {}
        self._newest: dict[str, str] = {}
        self._current: dict[str, str] = {}
        self._withdrawn: dict[str, Manifest] = {}

    @property
    def num_adapters(self) -> int:
        """Number of adapters of which a version is or was published."""
        return len(self._newest)

    def get(self, name: str) -> Manifest | None:
        """Return the version of this name, or None if it is not known."""
        return self._published.get(name) or self._pinned.get(name)

    def find(self, adapter: str) -> Manifest:
        """Return an adapter's current version, or the one of a name such as "coder@7"; raises RefusedError if there is none."""
        manifest = self.get(self._current.get(adapter, adapter))
        if manifest is None:
            current = self._current.get(adapter.rpartition("@")[0])  # the message names no other adapter, which may be another client's
            raise RefusedError(f"there is no adapter {adapter[:200]!r}; {f'{current} is current' if current else 'publish it first'}")
        return manifest

    def newest(self) -> list[Manifest]:
        """Return the newest version of each adapter that has been published."""
        return [manifest for name in self._newest.values() if (manifest := self.get(name))]

    def add(self, manifest: Manifest, *, pinned: bool = False) -> None:
        """Add a version that is about to be published, and make it its adapter's newest.

        A pinned version may be older than others; if it is the newest, it becomes so only when an engine serves it.

        Raises:
            PublishError: the version is not newer than the adapter's newest, or `pin` refuses it.
        """
        newest = self._newest.get(manifest.adapter)
        if pinned or manifest.name in self._pinned:
            self.pin(manifest)
            return
        if newest is not None and manifest.version <= version_of(newest):
            raise PublishError(
                f"{manifest.name} is not newer than {newest}; a version is published once, and an adapter's versions count up")
        self._withdrawn.pop(manifest.name, None)
        self._published[manifest.name], self._newest[manifest.adapter] = manifest, manifest.name

    def serves(self, name: str) -> None:
        """Note that an engine serves a version: the newest version that any engine serves is current. Forgotten versions do not count."""
        if self.get(name) is not None:
            adapter = adapter_of(name)
            for known in (self._current, self._newest):
                known[adapter] = max(known.get(adapter, name), name, key=version_of)

    def withdraw(self, name: str) -> None:
        """Forget a version that was not published after all, unless an engine serves it as current."""
        adapter = adapter_of(name)
        if self._current.get(adapter) == name:
            return
        manifest = self._published.pop(name, None)
        if self._pinned.pop(name, None) is None and manifest is not None:
            self._withdrawn[name] = manifest
        if self._newest.get(adapter) == name:
            del self._newest[adapter]
            if adapter in self._current:
                self._newest[adapter] = self._current[adapter]

    def remove(self, adapter: str) -> None:
        """Forget the published versions of an adapter; its pinned versions stay."""
        self._current.pop(adapter, None)
        self._newest.pop(adapter, None)
        self._published = {name: manifest for name, manifest in self._published.items() if manifest.adapter != adapter}

    def pin(self, manifest: Manifest) -> None:
        """Add a version that stays until unpinned; repeating it is harmless. Raises PublishError if the name stands for another folder."""
        known = self.get(manifest.name)
        if known is not None and (known.folder, known.fingerprint) != (manifest.folder, manifest.fingerprint):
            raise PublishError(f"{manifest.name} is {known.folder} and cannot become {manifest.folder}; a version is immutable")
        self._withdrawn.pop(manifest.name, None)
        self._pinned[manifest.name] = manifest

    def unpin(self, name: str) -> None:
        """Forget a pinned version, even if it is its adapter's current one; does nothing for a name that is not pinned."""
        if self._pinned.pop(name, None) is None:
            return
        self._published.pop(name, None)
        for known in (self._current, self._newest):
            if known.get(adapter_of(name)) == name:
                del known[adapter_of(name)]

    def may_go(self, name: str) -> bool:
        """Whether engines need not hold a version any more: it is neither pinned nor its adapter's current one."""
        return name not in self._pinned and name != self._current.get(adapter_of(name))

    def prune(self, in_use: Collection[str]) -> list[str]:
        """Forget versions that are neither among an adapter's newest, nor pinned, nor named in `in_use`. Returns their folders.

        A version that was withdrawn is one of them as soon as its adapter has a newer one; until then, it can be looked at.
        """
        kept = {*in_use, *self._newest.values(), *self._current.values()}
        by_adapter: dict[str, list[str]] = {}
        for name in sorted(self._published, key=version_of):
            by_adapter.setdefault(self._published[name].adapter, []).append(name)
        old = [name for names in by_adapter.values() for name in names[: -self._keep] if name not in kept and name not in self._pinned]
        failed = [
            name for name, manifest in self._withdrawn.items()
            if name not in in_use and version_of(self._newest.get(manifest.adapter, name)) > manifest.version]
        return [manifest.folder for manifest in (*map(self._withdrawn.pop, failed), *map(self._published.pop, old))]


def adapter_of(name: str) -> str:
    """Return the adapter's name from the name of a version; "coder" for "coder@7"."""
    return split_adapter_name(name)[0]


def version_of(name: str) -> Version:
    """Return the version's number from its name; 7 for "coder@7"."""
    return split_adapter_name(name)[1]
