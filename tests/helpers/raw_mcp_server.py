"""An MCP server without the SDK, for what no SDK would do; run as a script by the tests.

Arguments: `--slow` never answers; `--noise` prints a banner first; `--twice` lists a tool twice;
`--broken` lists a tool whose schema is none, `--deep=N` one whose schema has N levels; a name
`--tool=NAME` is listed as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DESCRIPTIONS = {
    "echo": "Say it again.",
    "die": "Exit in the middle of a call.",
    "garbage": "Answer with what is no message.",
    "flood": "Print what is no message, without end.",
    "hang": "Never answer.",
    "env": "Tell the environment.",
    "pids": "Start a child; tell its process and one's own.",
    "where": f"Tell the arguments, {sys.argv[1:]}, and the directory.",
    "refuse": "Answer with an error of the protocol.",
    "big": "Say very much.",
}
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


def main() -> None:
    """Answer line by line."""
    print(f"started {os.getpid()}", file=sys.stderr, flush=True)
    if "--noise" in sys.argv:
        print("Welcome!\n{not json", flush=True)
    if "--slow" in sys.argv:
        time.sleep(600)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            answer = reply(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)


def reply(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "raw", "version": "1"}
        version = params["protocolVersion"]
        capabilities: dict[str, Any] = {"tools": {}}
        result = {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
        return {"result": result}
    if method == "tools/list":
        names = [*DESCRIPTIONS, *(arg[7:] for arg in sys.argv if arg.startswith("--tool="))]
        names += ["echo"] if "--twice" in sys.argv else []
        tools = [
            {"name": name, "description": DESCRIPTIONS.get(name, ""), "inputSchema": SCHEMA}
            for name in names
        ]
        if "--broken" in sys.argv:
            tools[0]["inputSchema"] = {"type": "object", "properties": {"text": {"type": "odd"}}}
        for argument in sys.argv:
            if argument.startswith("--deep="):
                for _ in range(int(argument[7:])):
                    tools[0]["inputSchema"] = {"properties": {"a": tools[0]["inputSchema"]}}
        return {"result": {"tools": tools}}
    if method == "tools/call" and params["name"] == "refuse":
        return {"error": {"code": -32603, "message": "not today"}}
    if method == "tools/call":
        text = call(params["name"], params.get("arguments") or {})
        return {"result": {"content": [{"type": "text", "text": text}]}}
    return {"error": {"code": -32601, "message": "no such method"}}


def call(name: str, arguments: dict[str, Any]) -> str:
    match name:
        case "die":
            os._exit(3)
        case "garbage":
            print("\x00 oops \xff {}", flush=True)
            time.sleep(600)
        case "flood":
            while True:
                print("no message at all", flush=True)
        case "hang":
            time.sleep(600)
        case "env":
            return json.dumps(dict(os.environ))
        case "pids":
            child = subprocess.Popen(["sleep", "600"])
            return json.dumps([os.getpid(), child.pid])
        case "where":
            return json.dumps([sys.argv[1:], str(arguments.get("text")), str(Path.cwd())])
        case "big":
            return "x" * 300_000
    return str(arguments.get("text"))


if __name__ == "__main__":
    main()
