# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the stand-in: never asked, since nothing is compiled."""

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target) -> bool:
        return False

    def hash(self):
        raise NotImplementedError

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language):
        raise NotImplementedError

    def load_dialects(self, context):
        raise NotImplementedError

    def get_module_map(self):
        raise NotImplementedError
