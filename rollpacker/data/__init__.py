"""From files to prompts: tokenizer, chat template, rows, and a resumable order over them.

    storage --Row--> formats, references --> rows --Prompt--> dataset (with mix): order, cursor

`load_run_data` is the way in. Nothing here imports torch or transformers.
"""

from rollpacker.data.chat_template import ChatTemplate
from rollpacker.data.dataset import DataCursor, PromptDataset
from rollpacker.data.errors import DataError
from rollpacker.data.rows import PromptRules, load_prompts
from rollpacker.data.run_data import RunData, load_run_data
from rollpacker.data.tokenizer import TextTokenizer

__all__ = [
    "ChatTemplate",
    "DataCursor",
    "DataError",
    "PromptDataset",
    "PromptRules",
    "RunData",
    "TextTokenizer",
    "load_prompts",
    "load_run_data",
]
