"""[agent]: agents, tools and environments of the workflows of several turns, and the processes in which they run."""

from offbeat.config.base import Change, Section, field

PLAYS = {"agent": ("program", "command", "environment"), "gym": ("environment",), "tool_loop": ("tools",)}
"""Settings of [agent] that each workflow plays."""


class AgentConfig(Section):
    """Agents, tools and environments, for rollout.workflow = "agent", "tool_loop" or "gym"."""

    on_resume = Change.TOLD
    read_by = ("rl",)

    program: str = field(
        "", "The agent of rollout.workflow = \"agent\": a function of your own, my_agent.py:run or module:function, that is given a base "
        "URL, a key and a row, and returns the reward.", on_resume=Change.CODE)
    command: tuple[str, ...] = field(
        (), "Instead of a program, a command and its arguments, which finds the same in OPENAI_BASE_URL, OPENAI_API_KEY, "
        "ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and OFFBEAT_ROW_FILE, and prints its reward as the last line.", on_resume=Change.CODE)
    environment: str = field(
        "", "What is played with rollout.workflow = \"gym\": my_env.py:MyEnv, textarena:TicTacToe-v0, skyrl-gym:gsm8k_multi_turn, "
        "gem:NAME, openenv:URL or reasoning-gym:chain_sum; with \"agent\", an environment that brings its own loop, as verifiers:my_env.",
        on_resume=Change.CODE)
    options: tuple[str, ...] = field((), "Options of the environment, each as in num_players=2; its defaults hold for the others.")
    tools: tuple[str, ...] = field(
        (), "Tools of rollout.workflow = \"tool_loop\": tools.py:add for a typed function, tools.py:MyEnv for a class whose public "
        "methods are tools, or mcp:COMMAND or mcp:URL for those of an MCP server.", on_resume=Change.CODE)
    model: str = field(
        "policy", "Model name given to agents; requests for any name are answered by the policy.", min_length=1, on_resume=Change.FREE)
    host: str = field(
        "127.0.0.1", "Address that the proxy listens on, which agents call; programs in containers or on other machines need another one, "
        "which others can reach, too: a key of each episode is all that keeps them out.", min_length=1, on_resume=Change.FREE)
    told_host: str = field(
        "", "Name or address of this machine that agents are told, such as host.docker.internal; empty tells them agent.host.",
        on_resume=Change.FREE)
    max_turns: int = field(
        16, "Maximum model calls in one episode; a further call is refused, or ends the episode where Offbeat runs the loop. Bounds the"
        " cost of an agent that loops.", ge=1)
    timeout_s: float = field(
        240.0, "Seconds for one episode's own work: your code, tools and environments. Its reward, its wait for a place and its requests to"
        " engines do not count, so that busy engines lose no long episodes. A later one fails alone, so this has to be below"
        " rollout.episode_timeout_s, at which the whole group fails.", gt=0, on_resume=Change.FREE)
    step_timeout_s: float = field(
        60.0, "Seconds for one tool call or environment step; a tool call that takes longer returns an error to the model, an environment"
        " step fails its episode.", gt=0, on_resume=Change.FREE)
    max_result_chars: int = field(
        8000, "Maximum characters of a tool's result or an observation; longer ones lose their middle, so that they do not fill the"
        " context.", ge=100)
    keep_reasoning: bool = field(
        True, "Keep the reasoning of earlier turns in the prompt, so that an episode stays one sequence; false renders each prompt as the"
        " chat template does, which may start a new sequence at each turn.")
    tool_format: str = field(
        "", "Format in which the model writes tool calls, such as hermes; empty detects it from the chat template, or else describes hermes"
        " in the system message.")
    processes: int = field(1, "Processes that run your code.", ge=1, on_resume=Change.FREE)
    episodes_per_process: int = field(
        64, "Episodes that one process plays at the same time; more have to wait. Async functions share its event loop, plain functions get"
        " a thread each.", ge=1, on_resume=Change.FREE)
    blocked_timeout_s: float = field(
        20.0, "Seconds for which your code may block a process that plays several episodes; after that the process is replaced and its"
        " episodes are played again.",
        gt=0, on_resume=Change.FREE)
    memory_bytes: int = field(
        8 * 2**30, "Memory that such a process may take, and each process of a command; 0 sets no limit.", ge=0, on_resume=Change.FREE)
    env: tuple[str, ...] = field(
        (), "Environment variables passed to your code although they look like secrets; all others that look like secrets are withheld.",
        on_resume=Change.FREE)
    python: str = field(
        "", "Python of another virtual environment, for libraries that bring their own loop and their own versions of packages; empty "
        "takes this one.", on_resume=Change.FREE)

    def check(self, *, workflow: str, episode_timeout_s: float) -> None:
        """Raise ValueError if this contradicts [rollout]."""
        played = {name: value for name in ("program", "command", "environment", "tools") if (value := getattr(self, name))}
        allowed = PLAYS.get(workflow, ())
        if wrong := [name for name in played if name not in allowed]:
            others = " or ".join(f"'{other}'" for other, names in PLAYS.items() if wrong[0] in names)
            raise ValueError(
                f"agent.{wrong[0]} must be empty with rollout.workflow = '{workflow}', got {played[wrong[0]]!r}; it is for {others}")
        if allowed and len(played) != 1:
            raise ValueError(
                f"one of {', '.join(f'agent.{name}' for name in allowed)} must be given with rollout.workflow = '{workflow}', got"
                f" {' and '.join(played) or 'none'}; it says what is played")
        if allowed and self.timeout_s >= episode_timeout_s:
            raise ValueError(
                f"rollout.episode_timeout_s must be above agent.timeout_s = {self.timeout_s:g}, got {episode_timeout_s:g}; a group fails as"
                " a whole at the former, before a slow episode fails by itself")
        if workflow in ("agent", "gym") and self.environment and self.owns_loop != (workflow == "agent"):
            raise ValueError(
                f"rollout.workflow must be '{'agent' if self.owns_loop else 'gym'}' with agent.environment = {self.environment!r}, got"
                f" '{workflow}'; {'it brings its own loop' if self.owns_loop else 'it has steps for the loop here'}")
        if self.host in ("0.0.0.0", "::") and not self.told_host:
            raise ValueError(
                f"agent.told_host must be given with agent.host = {self.host!r}, which is every address of this machine and none that could"
                " be called; set it to the name under which agents reach this machine")
        if self.python and not self.owns_loop:
            raise ValueError(
                f"agent.python must be empty without an environment that brings its own loop, got {self.python!r}; agent.command can name"
                " another Python")

    @property
    def reached_at(self) -> str:
        """The name or address under which agents reach the proxy."""
        return self.told_host or self.host

    @property
    def owns_loop(self) -> bool:
        """Whether the environment calls the model itself."""
        return self.environment.startswith("verifiers:")
