"""Custom logit processors that tests send to their servers by value: nothing here is imported there."""

import dill
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

# By value, with what the class refers to.
dill.settings["recurse"] = True


class BanTheThirdLast(CustomLogitProcessor):
    """Depends on every output: forbids the token of three outputs before and favours one by the number of outputs."""

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]
        for row, params in enumerate(custom_param_list):
            outputs = list(params["__req__"].output_ids)
            if len(outputs) >= 3:
                logits[row, outputs[-3]] = -float("inf")
            logits[row, len(outputs) * 7 % 100] += params["strength"]
        return logits


BanTheThirdLast.__module__ = "__main__"
