"""Run in lm-eval's own environment: asks a server for log likelihoods, and prints them as JSON.

Arguments: the URL of /v1/completions, and a JSON object: `model`, `pairs` of context and
continuation, `texts` to be scored whole, and `options` of lm-eval's class.
"""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def main() -> None:
    url, given = sys.argv[1], json.loads(sys.argv[2])
    model = LocalCompletionsAPI(
        base_url=url, model=given["model"], max_retries=1, **given["options"]
    )

    def requests(kind: str, arguments: list) -> list:
        return [Instance(kind, {}, tuple(each), i) for i, each in enumerate(arguments)]

    found = {
        "loglikelihood": model.loglikelihood(requests("loglikelihood", given["pairs"])),
        "rolling": model.loglikelihood_rolling(
            requests("loglikelihood_rolling", [[text] for text in given["texts"]])
        ),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
