"""The operations: named contracts that backends implement."""

from kernelreg.ops.operation import Operation, operation_named, operations

__all__ = ["Operation", "operation_named", "operations"]
