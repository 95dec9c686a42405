"""The services and their Redis as child processes on this machine: `LocalStack`."""

from rollpacker.local_stack.stack import LocalStack
from rollpacker.local_stack.supervisor import StackError

__all__ = ["LocalStack", "StackError"]
