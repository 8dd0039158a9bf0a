"""An adapter as one tar file."""

import asyncio
import io
import json
import tarfile
from pathlib import Path

import pytest
from peft import PeftConfig
from safetensors.numpy import load

from http_serving import Answer, Client, Serve
from offbeat.service.app.archive import stream
from protocol import finished, model_of, session_of


def taken(files: dict[str, Path]) -> tuple[bytes, int]:
    """What is sent, and how long it was said to be."""
    async def main() -> tuple[bytes, int]:
        answer = stream(files, base_model="org/base")
        pieces = [piece if isinstance(piece, bytes) else b"" async for piece in answer.body_iterator]
        return b"".join(pieces), int(answer.headers["content-length"])

    return asyncio.run(main())


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 3 * 2**20 + 5])
def test_an_archive_holds_the_files_and_a_sign_that_it_is_whole(tmp_path: Path, size: int) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(i % 251 for i in range(size)))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": "/srv/secret/model"}))
    files = {name: tmp_path / name for name in ("adapter_config.json", "adapter_model.safetensors")}
    sent, length = taken(files)
    assert len(sent) == length and b"/srv/secret" not in sent
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        read = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    assert set(read) == {*files, "checkpoint_complete"} and read["checkpoint_complete"] == b""
    assert read["adapter_model.safetensors"] == files["adapter_model.safetensors"].read_bytes()
    assert json.loads(read["adapter_config.json"]) == {"r": 4, "base_model_name_or_path": "org/base"}


def test_files_that_go_while_they_are_sent_are_sent_whole(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(b"weights")

    async def main() -> bytes:
        answer = stream({path.name: path}, base_model="org/base")
        path.unlink()
        return b"".join([piece if isinstance(piece, bytes) else b"" async for piece in answer.body_iterator])

    with tarfile.open(fileobj=io.BytesIO(asyncio.run(main()))) as tar:
        assert tar.extractfile(path.name).read() == b"weights"  # type: ignore[union-attr]
    with pytest.raises(OSError):
        taken({path.name: path})


def test_an_adapter_is_downloaded_as_one_file_while_whoever_asked_may_have_it(serve: Serve, tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        model, bob = await model_of(client, await session_of(client)), client.of("tml-bob")
        for seq, name in enumerate(("save_weights_for_sampler", "save_weights_external", "save_weights"), start=1):
            await finished(client, await client.post(name, {"model_id": model, "seq_id": seq, "path": "out"}))

        async def fetched(link: Answer) -> Answer:
            return await client.of("").ask("GET", link.json["url"].removeprefix(client.url))

        for segment in ("sampler_weights", "external_weights"):
            path = f"training_runs/{model}/checkpoints/{segment}/out"
            assert (await bob.get(f"{path}/archive")).status == 404
            link = await client.get(f"{path}/archive")
            archive = await fetched(link)
            assert archive.status == 200 and int(archive.headers["content-length"]) == len(archive.body)
            with tarfile.open(fileobj=io.BytesIO(archive.body)) as tar:
                tar.extractall(tmp_path / segment, filter="data")
            about = PeftConfig.from_pretrained(str(tmp_path / segment))  # type: ignore[attr-defined]
            assert (about.r, about.base_model_name_or_path) == (4, "org/small")
            assert load((tmp_path / segment / "adapter_model.safetensors").read_bytes())
            await client.post(f"{path}/publish")
            theirs = await bob.get(f"{path}/archive")
            assert (await fetched(theirs)).status == 200
            await client.ask("DELETE", f"/api/v1/{path}/publish")
            assert (await fetched(theirs)).status == 404 and (await fetched(link)).status == 200
            await client.ask("DELETE", f"/api/v1/{path}")
            assert (await fetched(link)).status == 404
        state = await client.get(f"training_runs/{model}/checkpoints/weights/out/archive")
        assert state.status == 400 and "save one with save_weights_for_sampler" in state.detail
        assert (await client.of("").get("archives/nothing.tar")).status == 404

    serve(body)
