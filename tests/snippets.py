"""Runs snippets one after another in the same namespace, as a reader would who types them; for `pages`.

Each line of stdin is JSON, code and a name for it; each line of stdout is what went wrong, or nothing.
"""

import json
import sys
import traceback
import warnings

warnings.simplefilter("ignore")
sys.path[0] = ""
answers, sys.stdout = sys.stdout, sys.stderr
space: dict[str, object] = {"__name__": "__main__"}
for line in sys.stdin:
    code, name = json.loads(line)
    try:
        exec(compile(code, name, "exec"), space)
        answer = ""
    except BaseException:
        answer = traceback.format_exc()
    print(json.dumps(answer), file=answers, flush=True)
