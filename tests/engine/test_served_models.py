"""Names of the models that an engine serves."""

from pathlib import Path

import pytest

from engine_http import fetch


@pytest.mark.parametrize(("path", "asked"), [
    ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3})])
def test_a_model_that_is_not_here_is_answered_404_with_the_names_of_those_that_are(path, asked, url, model_folder):
    status, _, answer = fetch(url, path, {**asked, "model": "gpt-9"})
    assert status == 404 and answer["error"]["message"] == (
        f"no model is called 'gpt-9' here; this engine serves {Path(model_folder('qwen3')).name!r}; leave model out for the first")


def test_the_model_itself_is_asked_for_by_its_name_its_path_or_no_name(url, model_folder):
    for name in ("", None, model_folder("qwen3"), Path(model_folder("qwen3")).name):
        assert fetch(url, "/v1/completions", {"prompt": "a", "model": name})[0] == 200


def test_a_model_is_described_by_its_name_and_what_is_not_there_is_an_error_object(url):
    listed = fetch(url, "/v1/models")[2]["data"][0]
    assert fetch(url, f"/v1/models/{listed['id']}")[2] == listed and listed["created"] > 1e9
    status, _, missing = fetch(url, "/v1/models/nobody/knows")
    assert status == 404 and missing["error"]["param"] == "model" and missing["error"]["code"] == "not_found"
    status, _, missing = fetch(url, "/v1/nothing")
    assert status == 404 and missing["error"]["message"] == "this server has no GET /v1/nothing"
    status, _, wrong = fetch(url, "/v1/messages")
    assert status == 405 and wrong["error"]["message"] == "/v1/messages does not take GET" and wrong["type"] == "error"
