"""Writes golden.json: bytes as the public Tinker client makes and reads them, for the tests beside it.

Run in an environment that has the client, and again when the protocol grows:

    .venv-tinker/bin/python tests/service/wire/make_golden.py
"""

import base64
import json
from pathlib import Path

import numpy as np
import tinker
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.copy_weights_request import CopyWeightsRequest
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.save_weights_external_request import SaveWeightsExternalRequest

rng = np.random.default_rng(7)


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def datum(tokens, **inputs):
    """A datum, and what it holds: sparse tensors as the dense ones that they stand for."""
    plain = {name: np.asarray(values).tolist() for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs), {"tokens": list(tokens), **plain}


def request(name, loss, datums, config=None, forward_only=False):
    body = ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(data=[made for made, _ in datums], loss_fn=loss, loss_fn_config=config),
        model_id="0f:train:1", seq_id=12)
    message = forward_backward_request_to_proto(body)
    message.forward_only = forward_only
    sparse = [sorted(key for key, tensor in made.loss_fn_inputs.items() if tensor.sparse_crow_indices is not None) for made, _ in datums]
    return {
        "name": name, "loss": loss, "config": config or {}, "forward_only": forward_only, "sparse": sparse,
        "datums": [plain for _, plain in datums], "body": text(message.SerializeToString())}


def sparse(length, width, cells):
    dense = np.zeros((length, width))
    for row, column, value in cells:
        dense[row, column] = value
    return dense


def policy(length, **more):
    logprobs, advantages = rng.normal(size=(2, length)).astype(np.float32)
    return datum(
        rng.integers(0, 50, length).tolist(), target_tokens=rng.integers(0, 50, length), logprobs=logprobs, advantages=advantages, **more)


def requests():
    cells = [(0, 1, 7), (2, 0, 9), (2, 3, 11)]
    targets = torch.tensor(sparse(6, 5, cells), dtype=torch.int64)
    weights = torch.tensor(sparse(6, 5, [(0, 1, 0.5), (2, 3, -2.0), (4, 4, 0.25)]), dtype=torch.float32)
    two_chunks = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]).append(types.EncodedTextChunk(tokens=[3])),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]})
    return [
        request("dense", "cross_entropy", [
            datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, -0.5]), datum([9], target_tokens=[8], weights=[1.0])]),
        request("chunks", "cross_entropy", [(
            two_chunks, {"tokens": [1, 2, 3], "target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]})], forward_only=True),
        request("wide", "cross_entropy", [datum([1, 2], target_tokens=[[1, 2, 3], [4, 5, 6]], weights=[[0.1, 0.2, 0.7], [1.0, 0.0, 0.0]])]),
        request("sparse", "cross_entropy", [datum(range(6), target_tokens=targets, weights=weights)]),
        request("sparse weights", "cross_entropy", [datum(range(6), target_tokens=targets + 1, weights=weights)]),
        request("sparse targets", "cross_entropy", [datum(range(6), target_tokens=targets, weights=weights.numpy() + 0.0)]),
        request("ppo", "ppo", [policy(4), policy(3)], {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}),
        request("importance_sampling", "importance_sampling", [policy(5)]),
        request("cispo", "cispo", [policy(2)], {"clip_high_threshold": 3.0}),
        request("dro", "dro", [policy(2)], {"beta": 0.1}),
        request("gspo", "gspo", [policy(3, sequence_ratio_mask=np.array([0.0, 1.0, 1.0], np.float32))]),
    ]


def output():
    """Results of a pass over datums of [3], [1], [2, 2] and [1] targets."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": 2.5, "tokens:sum": 7.0})
    for datums in ([[-0.5, -1.0, -1.5], [-2.0]], [[[-0.25, 0.0], [-0.75, -4.0]]], [[-3.0]]):
        arrays = [np.array(values, np.float32) for values in datums]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype(np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(arrays[0].shape[1:])
    data = message.SerializeToString()
    read = deserialize_forward_backward_output(data)
    logprobs = [entry["logprobs"].to_numpy().tolist() for entry in read.loss_fn_outputs]
    return {"body": text(data), "logprobs": logprobs, "metrics": read.metrics}


def tensor(array, dtype):
    return pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def top(ids, logprobs):
    ids, logprobs = np.array(ids, np.int32), np.array(logprobs, np.float32)
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=ids.shape[1], length=ids.shape[0])


def samples():
    """Two samples of a prompt of three tokens, with all that can be asked for."""
    none = -99999.0
    message = pb.SampleResponse(
        sequences=[
            pb.SampledSequence(
                stop_reason=pb.STOP_REASON_LENGTH, tokens=np.array([5, 6], np.int32).tobytes(),
                logprobs=np.array([-0.5, -1.0], np.float32).tobytes(),
                topk_sampled_logprobs=top([[5, 1], [6, 0]], [[-0.5, -1.5], [-1.0, none]])),
            pb.SampledSequence(
                stop_reason=pb.STOP_REASON_STOP, tokens=np.array([2], np.int32).tobytes(), logprobs=np.array([-2.0], np.float32).tobytes()),
        ],
        prompt_logprobs=np.array([np.nan, -1.0, -3.0], np.float32).tobytes(),
        topk_prompt_logprobs=top([[0, 0], [4, 3], [7, 0]], [[none, none], [-0.25, -1.25], [-0.5, none]]),
        target_prompt_logprobs=tensor(np.array([[-1.0, 0.0], [-2.0, -3.0]], np.float32), pb.DTYPE_FLOAT32))
    data = message.SerializeToString()
    read = deserialize_sample_response(data)
    return {
        "body": text(data), "tokens": [list(sequence.tokens) for sequence in read.sequences],
        "logprobs": [list(sequence.logprobs) for sequence in read.sequences],
        "stop_reasons": [sequence.stop_reason for sequence in read.sequences],
        "top": [sequence.topk_logprobs for sequence in read.sequences],
        "prompt_logprobs": read.prompt_logprobs, "topk_prompt_logprobs": read.topk_prompt_logprobs,
        "target_prompt_logprobs": read.target_prompt_logprobs.tolist()}


def json_bodies():
    """JSON requests, by the kind that reads them."""
    ids = {"model_id": "0f:train:1", "seq_id": 3}
    targets = tinker.TensorData.from_torch_sparse(torch.tensor([[-1, -1, -1, -1, -1, -1, -1, 5], [-1] * 8]), pad_value=-1)
    sample = types.SampleRequest(
        num_samples=2, prompt=types.ModelInput.from_ints([1, 2, 3]), sampling_session_id="0f:sample:0", seq_id=3_000_000_000,
        sampling_params=types.SamplingParams(max_tokens=4, seed=1, stop=["a", "b"], temperature=0.5), prompt_logprobs=True,
        target_prompt_logprobs={
            "data": targets.data, "dtype": targets.dtype, "shape": targets.shape, "sparse_crow_indices": targets.sparse_crow_indices,
            "sparse_col_indices": targets.sparse_col_indices})
    made = {
        "CreateSessionBody": types.CreateSessionRequest(tags=["a"], user_metadata={"k": 1}, sdk_version="0"),
        "CreateModelBody": types.CreateModelRequest(
            session_id="0f", model_seq_id=0, base_model="b", lora_config=types.LoraConfig(rank=8), user_metadata={"k": "v"}),
        "ModelBody": types.GetInfoRequest(model_id="0f:train:1"),
        "OptimStepBody": types.OptimStepRequest(optim_params=types.AdamParams(learning_rate=1e-3), **ids),
        "SaveWeightsBody": types.SaveWeightsRequest(path="a", ttl_seconds=3600, **ids),
        "SaveForSamplerBody": types.SaveWeightsForSamplerRequest(sampling_session_seq_id=0, **ids),
        "SaveExternalBody": SaveWeightsExternalRequest(path="a", **ids),
        "LoadWeightsBody": types.LoadWeightsRequest(session_id="0f", model_seq_id=0, path="tinker://0f:train:1/weights/a", optimizer=True),
        "CreateSamplingSessionBody": types.CreateSamplingSessionRequest(session_id="0f", sampling_session_seq_id=0, base_model="b"),
        "RetrieveFutureBody": FutureRetrieveRequest(request_id="0f:train:1:3", allow_metadata_only=True),
        "CopyWeightsBody": CopyWeightsRequest(session_id="0f", model_seq_id=1, source_path="tinker://0f:train:1/weights/a"),
        "SampleBody": sample,
    }
    return {kind: request.model_dump(exclude_none=True, mode="json") for kind, request in made.items()}


def schema():
    """Every message's fields: number, name, type, and whether it is repeated."""
    found = {}

    def add(message, name):
        found[name] = [[field.number, field.name, field.type, field.is_repeated] for field in message.fields]
        for field in message.fields:
            if field.message_type and field.message_type.full_name not in seen:
                seen.add(field.message_type.full_name)
                add(field.message_type, field.message_type.name)

    seen = set()
    for name in ("ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse"):
        add(pb.DESCRIPTOR.message_types_by_name[name], name)
    return found


if __name__ == "__main__":
    golden = {
        "client": tinker.__version__, "requests": requests(), "output": output(), "samples": samples(), "json_bodies": json_bodies(),
        "schema": schema()}
    Path(__file__).with_name("golden.json").write_text(json.dumps(golden, indent=1) + "\n")
