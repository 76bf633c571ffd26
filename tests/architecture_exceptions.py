"""What breaks the rules of tests/test_architecture.py today, with the reason. These lists may only become shorter."""

from __future__ import annotations

Exceptions = dict[tuple[str | int, ...], str]

# Files at the root of src/explorl, each with the package that it is to be moved to.
ROOT_MODULES: Exceptions = {}

# A module and a package below its own that it imports.
FORBIDDEN_IMPORTS: Exceptions = {
    ("core.config.schema", "evaluation"): "names in a configuration are checked while it is read",
    ("core.config.schema", "rollout"): "names in a configuration are checked while it is read",
    ("core.config.schema", "strategies"): "names in a configuration are checked while it is read",
    ("core.config.schema", "tasks"): "names in a configuration are checked while it is read",
    ("core.config.schema", "training"): "names in a configuration are checked while it is read",
}

# Modules that import each other.
CYCLES: Exceptions = {
    ("rollout.engine", "rollout.session", "rollout.trial"): "the back reference is for type hints only",
    ("rollout.tool_session", "rollout.tool_use"): "the back reference is for type hints only",
    (
        "sandbox.interpreter",
        "sandbox.interpreter_pool",
        "sandbox.interpreter_process",
    ): "the back reference is for type hints only",
}

# A public class name and in how many modules it is defined.
DUPLICATE_CLASSES: Exceptions = {}

# The name of a file and how many have it.
DUPLICATE_STEMS: Exceptions = {
    ("base", 2): "the protocol of strategies and that of tasks",
    ("registry", 3): "the built-in names of each kind of plug-in",
    ("run", 2): "a run of GRPO and one of SFT",
    ("sample", 2): "of tokens, and of completions with their verdicts",
    ("task", 6): "the task of each family",
    ("trainer", 3): "of GRPO, of SFT and inside verl",
}

# A module besides the adapter, and the private name of TRL's GRPO trainer that it uses.
PRIVATE_NAMES_OF_TRL: Exceptions = {
    ("training.grpo.logprobs", "_get_per_token_logps_and_entropies"): "calls what a user may have overridden",
    ("training.sft.trainer", "_metrics"): "the attribute of the same name of SFTTrainer",
    ("training.sft.trainer", "_total_train_tokens"): "the attribute of the same name of SFTTrainer",
}

# A package and a word that does not belong in code or text.
BANNED_WORDS: Exceptions = {
    ("sandbox", "nobody"): "the Unix user of this name",
    ("tasks", "anew"): "text of Countdown's reference solutions, which are training data",
    ("tasks", "nobody"): "a word that the verifier of numbers recognises",
}

# Packages where more than 2 % of the docstrings of functions start with "What", "Whether", "That", "How" or the like.
DOCSTRINGS_WITHOUT_VERB: Exceptions = {}
