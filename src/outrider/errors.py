"""Everything Outrider raises on purpose.

Error
 ├─ UserError            something the user can mend: one line on the command line, exit code 2
 │   ├─ ConfigError      an option, parameter or combination that cannot be honoured
 │   ├─ ModelNotFound    no such model, folder or file
 │   ├─ BadFile          a download or file that is truncated, corrupted or of the wrong kind
 │   └─ UnsupportedModel an architecture or configuration the decoder does not implement
 ├─ OutOfSlots           the KV pool is full; the scheduler answers it by preempting
 └─ ModelFault           a model returned logits that are not numbers
"""

from __future__ import annotations


class Error(Exception):
    """Base of every error raised by Outrider on purpose."""


class UserError(Error):
    """A mistake the user can mend. The message is one line: what is wrong, what would be right."""


class ConfigError(UserError, ValueError):
    """An option, a parameter or a combination of them that cannot be honoured."""


class ModelNotFound(UserError):
    """No model of that name, folder or file."""


class BadFile(UserError):
    """A file that is truncated, corrupted or not what it was expected to be."""


class UnsupportedModel(UserError):
    """An architecture or configuration that the decoder does not implement."""


class OutOfSlots(Error):
    """The KV pool has no free slot left."""


class ModelFault(Error):
    """A model returned logits that are NaN or infinite."""
