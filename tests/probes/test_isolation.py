"""What belongs to another owner is answered like what does not exist."""

from http_serving import Client
from protocol import PROTOBUF, datum, finished, model_of, pass_body, session_of
from sdk.server import MODEL_NAME
from support.probing import Probe


def test_a_neighbour_cannot_train_save_or_look_at_a_model(probe: Probe) -> None:
    async def body(alice: Client) -> None:
        mallory = alice.of("tml-mallory")
        model = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1.0}}
        refusals = [
            await mallory.post("forward_backward", pass_body(model, 1, [datum([5, 6, 7])]), headers=PROTOBUF),
            await mallory.post("optim_step", step),
            await mallory.post("save_weights", {"model_id": model, "seq_id": 1, "path": "mine"}),
            await mallory.post("get_info", {"model_id": model})]
        nothing = await mallory.post("get_info", {"model_id": model.replace(model[:8], "0" * 8)})
        assert {answer.status for answer in refusals} == {nothing.status} == {404}
        # Nothing of it took a number of the model's order.
        stepped = await finished(alice, await alice.post("forward_backward", pass_body(model, 1, [datum([5, 6, 7])]), headers=PROTOBUF))
        assert "loss:sum" in str(stepped["metrics"])

    probe(body)
