"""Versions that come to every engine as changes of those before, by folder and by broadcast: exact, small, and never of something else.

Weights are bfloat16, and a version is one step of Adam at a learning rate of 1e-5 from the last, so that few of them change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from contract import CANARY, WITH_VLLM, Engine, Models, embedded, vllm_group
from offbeat.errors import EngineError
from offbeat.inference.client import EngineClient
from offbeat.inference.dialects.vllm import VllmDialect
from offbeat.inference.sampling import Sample, Sampling
from offbeat.model.changes import FILE
from offbeat.model.changes_io import smaller_changes, write_changes
from offbeat.model.fingerprint import fingerprint
from offbeat.model.hf_io import read_safetensors
from offbeat.sync.weight_broadcast import Changes, WeightBroadcast
from offbeat.weights.protocol import Manifest, Proof

pytestmark = pytest.mark.timeout(400)  # the first test of vLLM starts the servers
LR = 1e-5
TIMEOUT_S = 60.0
VLLM = pytest.mark.skipif(not WITH_VLLM, reason="make test-vllm runs it")
KINDS = ["embedded", pytest.param("vllm", marks=VLLM), pytest.param("vllm-split", marks=VLLM)]
State = dict[str, Tensor]


def shown(state: State) -> str:
    return fingerprint((name, tensor.contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in state.items())


def size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


@dataclass(frozen=True)
class Version:
    """Weights, the folder by which engines know them, and what came before them."""

    folder: Path
    state: State
    before: "Version | None" = None

    @property
    def changes(self) -> State:
        assert self.before is not None
        found = smaller_changes(self.state, since=self.before.state)
        assert found is not None and size(found) < 0.1 * size(self.state)
        return found

    def write(self) -> None:
        """Whole where nothing is before it."""
        if self.before is None:
            self.folder.mkdir()
            save_file(self.state, self.folder / "model.safetensors", metadata={"format": "pt"})
        else:
            assert write_changes(self.state, self.folder, since=self.before.state, base=self.before.folder)


class Policy:
    """A policy that learns: its weights in float32 lie anywhere between two numbers of bfloat16, as after many steps."""

    def __init__(self, model: str, root: Path, *, seed: int = 5) -> None:
        self._root, self._random = root, torch.Generator().manual_seed(seed)
        self._state = {
            name: tensor.float() * (1 + 2**-9 * (torch.rand(tensor.shape, generator=self._random) - 0.5))
            for name, tensor in read_safetensors(model)}

    def version(self, name: str, before: Version | None = None) -> Version:
        for tensor in self._state.values():
            tensor += LR * torch.randn(tensor.shape, generator=self._random).sign()
        return Version(self._root / name, {name: tensor.bfloat16() for name, tensor in self._state.items()}, before)

    def versions(self, count: int) -> list[Version]:
        """The first of them whole."""
        found = [self.version("v0")]
        for number in range(1, count):
            found.append(self.version(f"v{number}", found[-1]))
        return found


@dataclass
class Publisher:
    """Brings versions to an engine by folder or by broadcast.

    Attributes:
        sent: "whole" or "changes" for every round of a broadcast.
    """

    engine: Engine
    way: str
    sent: list[str]

    def stage(self, version: Version, *, number: int = 0) -> Manifest:
        """Under a new number, unless one is given."""
        base = "" if version.before is None else str(version.before.folder)
        number = number or self.engine.next_version
        manifest = Manifest(number, str(version.folder), shown(version.state), CANARY, (), base=base)
        if self.way == "disk":
            if not version.folder.exists():
                version.write()
            self._stage(manifest)
            return manifest
        offer = WeightBroadcast(
            version.state, host="127.0.0.1", num_receivers=1, timeout_s=TIMEOUT_S, write_folder=lambda _state: None,
            changes=Changes(base, version.changes) if base else None)
        original = offer._round

        def counted(members: object, tensors: list[Tensor]) -> bool:
            self.sent.append("whole" if sum(tensor.nbytes for tensor in tensors) == size(version.state) else "changes")
            return original(members, tensors)  # type: ignore[arg-type]

        offer._round = counted  # type: ignore[method-assign, assignment]
        try:
            self._stage(Manifest(number, str(version.folder), manifest.fingerprint, CANARY, (), offer.address, base=base))
        finally:
            offer.close()
        return manifest

    def _stage(self, manifest: Manifest) -> None:
        self.engine.run(lambda client: client.stage(manifest, timeout_s=TIMEOUT_S))

    def switch(self, manifest: Manifest) -> Proof:
        async def body(client: EngineClient) -> Proof:
            await client.switch(manifest, interrupt="recompute", timeout_s=TIMEOUT_S)
            return await client.prove(CANARY, timeout_s=TIMEOUT_S)

        proof, engine = self.engine.run(body), self.engine
        assert (proof.version, proof.fingerprint, proof.live) == (manifest.version, manifest.fingerprint, True)
        engine.folder, engine.version = manifest.folder, manifest.version
        engine.next_version = max(engine.next_version, manifest.version + 1)
        return proof

    def publish(self, version: Version) -> Proof:
        return self.switch(self.stage(version))


@pytest.fixture(scope="module")
def servers(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """vLLM in bfloat16: of a model with tied heads, and of one without that is split over two workers."""
    settings = {"model__dtype": "bfloat16", "weights__whole_every_versions": "4"}
    runs = {
        "vllm": (models.folder(), settings),
        "vllm-split": (models.folder(tied=False), settings | {"inference__arguments": '["--tensor-parallel-size", "2"]'})}
    with vllm_group(tmp_path_factory.mktemp("vllm"), *runs.values()) as served:
        yield {
            kind: Engine("vllm", url, VllmDialect(model=model, whole_weights=True, lora=False, changes=True), model, model, key=key)
            for (kind, (model, _)), (url, key) in zip(runs.items(), served, strict=True)}


@pytest.fixture(scope="module", params=KINDS)
def changing(request: pytest.FixtureRequest, models: Models) -> Iterator[Engine]:
    """An engine of each kind that may get changes."""
    if request.param == "embedded":
        with embedded(models.folder(), dtype="bfloat16") as engine:
            yield engine
    else:
        yield request.getfixturevalue("servers")[request.param]


@pytest.fixture(params=["disk", "collective"])
def publisher(request: pytest.FixtureRequest, changing: Engine) -> Publisher:
    return Publisher(changing, request.param, [])


def test_versions_that_come_as_changes_compute_what_they_compute_when_they_come_whole(publisher: Publisher, tmp_path: Path) -> None:
    versions = Policy(publisher.engine.model, tmp_path).versions(4)
    proofs = [publisher.publish(version) for version in versions[:2]]
    if publisher.way == "disk":  # the engine needs no more of them than it has
        (versions[0].folder / "model.safetensors").unlink()
    proofs += [publisher.publish(version) for version in versions[2:]]
    assert len({proof.canary_logprobs for proof in proofs}) == 4
    assert publisher.sent == ([] if publisher.way == "disk" else ["whole", "changes", "changes", "changes"])
    again = publisher.publish(Version(tmp_path / "whole", versions[3].state))
    assert again.canary_logprobs == proofs[3].canary_logprobs and again.fingerprint == proofs[3].fingerprint


def test_an_engine_that_missed_versions_or_slept_without_weights_gets_all_that_it_lacks(publisher: Publisher, tmp_path: Path) -> None:
    versions = Policy(publisher.engine.model, tmp_path).versions(5)
    publisher.publish(versions[0])
    if publisher.way == "disk":
        versions[1].write()
    publisher.publish(versions[2])
    publisher.publish(versions[3])
    publisher.engine.run(lambda client: client.sleep(keep_weights=False, timeout_s=TIMEOUT_S))
    publisher.publish(versions[4])
    if publisher.way == "collective":
        # What the embedded engine computes with is all that it has, and that is gone.
        assert publisher.sent == ["whole", "whole", "changes", "whole" if publisher.engine.kind == "embedded" else "changes"]


def test_changes_that_do_not_fit_what_is_served_are_noticed(publisher: Publisher, tmp_path: Path) -> None:
    policy, stranger = (Policy(publisher.engine.model, tmp_path, seed=seed) for seed in (5, 6))
    first, other = policy.version("v0"), stranger.version("v0")
    Publisher(publisher.engine, "collective", []).publish(other)  # under the name of the first
    if publisher.way == "disk":
        first.write()
    publisher.publish(policy.version("v1", first))
    assert publisher.sent == ([] if publisher.way == "disk" else ["changes", "whole"])


def test_a_number_that_comes_again_brings_its_own_changes(publisher: Publisher, tmp_path: Path) -> None:
    policy = Policy(publisher.engine.model, tmp_path)
    first = policy.version("v0")
    publisher.publish(first)
    lost, new = policy.version("v1-lost", first), policy.version("v1-new", first)
    abandoned = publisher.stage(lost)
    publisher.switch(publisher.stage(new, number=abandoned.version))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def of_something_else(file: Path) -> None:
    """Complete, but changes of other weights than its base."""
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [cut, of_something_else, Path.unlink])
def test_changes_that_are_damaged_are_refused_and_the_live_weights_go_on(
    changing: Engine, tmp_path: Path, damage: Callable[[Path], None],
) -> None:
    publisher = Publisher(changing, "disk", [])
    versions = Policy(changing.model, tmp_path).versions(3)
    for version in versions[:2]:
        publisher.publish(version)
    versions[2].write()
    damage(versions[2].folder / FILE)
    bad = Manifest(changing.next_version, str(versions[2].folder), shown(versions[2].state), CANARY, ())

    async def body(client: EngineClient) -> list[Sample]:
        (running,) = await changing.sampling(lambda: client.generate(CANARY, Sampling(300, ignore_eos=True), n=4, timeout_s=TIMEOUT_S))
        with pytest.raises(EngineError, match=str(versions[2].folder)):
            await client.stage(bad, timeout_s=TIMEOUT_S)
        return await running

    samples = changing.run(body)
    assert {version for sample in samples for version in sample.versions} == {changing.version}
    publisher.publish(Version(tmp_path / "again", versions[2].state))  # whole, as the run writes it after such a refusal
