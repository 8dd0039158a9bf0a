"""Variables that processes of user code do not see."""

from offbeat.user_code.variables import secret_variables


def test_what_looks_like_a_secret() -> None:
    secrets = (
        "HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD", "AWS_SESSION", "MYSQL_PWD", "SSH_AUTH_SOCK", "GOOGLE_APPLICATION_CREDENTIALS", "KEY",
        "GITHUB_PAT", "client_secret", "OFFBEAT_API_KEY", "VLLM_API_KEY")
    others = ("PATH", "PWD", "OLDPWD", "HOME", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "HF_HOME")
    urls = {"A": "postgresql://u:p@h/d", "B": "http://user:pass@proxy:3128"}
    plain = {"C": "http://proxy:3128", "D": "postgresql://u@h/d", "E": "a:b@c"}
    environ = dict.fromkeys([*secrets, *others], "x") | urls | plain
    assert secret_variables(environ, allowed=()) == {*secrets, *urls}
    assert secret_variables(environ, allowed=["HF_TOKEN", "A"]) == {*secrets, "B"} - {"HF_TOKEN"}
