"""CAMEL's role playing: a teacher gives instructions, and a solver follows them. Played by examples/camel_agents.toml.

Both are the model in training, in a conversation of its own each. The agents are camel-ai's as they are; their token counter alone is
given, because its own fetches a vocabulary from the web. The reward is 1 if the solver's last message has the right answer.
"""

import json
import os

from camel.models import ModelFactory
from camel.societies import RolePlaying
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter

ROUNDS = 2
"""Instructions that the teacher gives, each with the solver's solution."""


class ByteCounter(BaseTokenCounter):
    """Counts bytes as tokens, of which there are more: the proxy bounds an episode by its real tokens."""

    def count_tokens_from_messages(self, messages):
        return sum(len(self.encode(str(message.get("content")))) for message in messages)

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


def play(task, *, rounds=ROUNDS):
    """Return the solver's last message."""
    model = ModelFactory.create(
        ModelPlatformType.OPENAI_COMPATIBLE_MODEL, model_type="policy", url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"], token_counter=ByteCounter())
    society = RolePlaying("Solver", "Teacher", task_prompt=task, with_task_specify=False, model=model)
    said = society.init_chat()
    for _ in range(rounds):
        solver, teacher = society.step(said)
        if not solver.msgs:
            break
        said = solver.msg
        if solver.terminated or teacher.terminated or "CAMEL_TASK_DONE" in teacher.msg.content:
            break
    return said.content


if __name__ == "__main__":
    row = json.loads(os.environ["OFFBEAT_ROW"])
    print(float(row["answer"] in play(row["prompt"])))
