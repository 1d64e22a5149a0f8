"""Looks at pages of `zckpt map` and `zckpt diff` in headless Chromium, at a desk's and a phone's width, and uses them.

    .venv/bin/python .ci/see_map.py [FOLDER [NAME ...]]

makes maps of fixtures, of a checkpoint that lacks files, of names that would do harm in a page, and of 100,000 tensors; opens
each and checks that it loads nothing, that nothing of it is an error or against its policy, that it is no wider than the screen,
that what a screen reader is told has names, that mouse and keyboard do what the page says, in light and dark, and how long a
search takes. Screenshots are left in FOLDER (.make/map). NAME: only these; "llama" makes the pictures of docs/map.md again. Needs
Chromium (`apt-get install chromium`), and aiohttp and pillow, which the tests bring; without a Chromium it says so, with exit
status 3.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from zckpt.jobs.reshard import reshard
from zckpt.pictures.checkpoint_map import checkpoint_map
from zckpt.pictures.map_page import map_page

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
sys.path.insert(0, str(ROOT / "tests"))
WIDTHS = {1280: 900, 390: 844}
SLOW_MS = 250
"""The longest that a search or a step of the list may take, for 100,000 tensors on a slow machine."""


def chromium() -> str | None:
    """The program, by any of its names."""
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


def pages(folder: Path) -> Iterator[tuple[str, Path]]:
    """The maps that are looked at, by name."""
    from html_pages import HOSTILE

    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    wide = work / "zero3_w8"
    reshard(FIXTURES / "fused" / "mixtral_zero3" / "checkpoint", wide, world_size=8, progress=False)
    broken = work / "broken"
    shutil.copytree(wide, broken)
    (broken / "zckpt.json").unlink()
    next(broken.glob("*/*_rank_5_*optim_states.pt")).unlink()
    next(broken.glob("*/*_rank_2_*model_states.pt")).write_bytes(b"")
    lost = work / "lost"
    shutil.copytree(FIXTURES / "mcore" / "stages_tp2_pp2" / "checkpoint", lost)
    next(lost.glob("*/__2_0.distcp")).unlink()
    weights(work / "hostile.safetensors", [(name, (2, 2)) for name in HOSTILE])
    giant = work / "giant"
    giant.mkdir()
    names = [f"model.layers.{n // 800}.mlp.experts.{n % 800}.down_proj.weight" for n in range(100_000)]
    for shard in range(8):
        part = [(name, (64, 16)) for name in names[shard::8]]
        weights(giant / f"model-{shard + 1:05}-of-00008.safetensors", part)
    index = {name: f"model-{n % 8 + 1:05}-of-00008.safetensors" for n, name in enumerate(names)}
    (giant / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    found = {
        "zero3_w8": (wide, None), "reshard": (wide, 3), "broken": (broken, None), "hostile": (work / "hostile.safetensors", None),
        "3d": (FIXTURES / "pipeline" / "zero1_pp2_tp2_dp2" / "checkpoint", None),
        "mcore": (FIXTURES / "mcore" / "stages_tp2_pp2" / "checkpoint", None),
        "experts": (FIXTURES / "moe" / "tensor_w4" / "checkpoint", None),
        "llama": (llama(work / "out" / "checkpoint-500"), 4),
        "boxes": (FIXTURES / "dcp" / "boxes_w4" / "checkpoint", None), "lost": (lost, None), "giant": (giant, None),
    }  # fmt: skip
    for name, (path, world_size) in found.items():
        file = folder / f"{name}.html"
        with contextlib.chdir(work):
            shown = path.relative_to(work) if path.is_relative_to(work) else path
            file.write_text(map_page(checkpoint_map(shown, world_size=world_size)), encoding="utf-8")
        yield name, file
    (folder / "diff.html").write_text(differences(work), encoding="utf-8")
    yield "diff", folder / "diff.html"
    shutil.rmtree(work)


def differences(work: Path) -> str:
    """The page of two checkpoints that differ in every way."""
    import torch

    import zckpt
    from zckpt.pictures.differences import differences_page

    generator = torch.Generator().manual_seed(1)
    a = {name: torch.randn(100, generator=generator) for name in ("small", "same", "huge", "shape", "lost")}
    b = {name: tensor.clone() for name, tensor in a.items() if name != "lost"} | {
        "shape": torch.ones(3),
        "gained": torch.ones(1),
    }
    b["small"] += 1e-3 * torch.randn(100, generator=generator)
    b["huge"][3] = 9
    for name, tensors in (("a.bin", a), ("b.bin", b)):
        torch.save(tensors, work / name)
    return differences_page(zckpt.diff(work / "a.bin", work / "b.bin", spreads=True), "a.bin", "b.bin")


def llama(folder: Path) -> Path:
    """A checkpoint of a small Llama, of which files are mostly tensors, as those of large models are."""
    import synth
    import torch

    hidden, wide, words, layers = 128, 352, 2000, 8
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(layers):
        own = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return synth.zero3(folder, [tensors], 8, tag="global_step500", step=500)


async def picture_of_the_page(tab: Tab, file: Path) -> None:
    """docs/map.png and docs/map-dark.png: a tensor before and after a reshard."""
    from PIL import Image

    for theme, name in (("light", "map.png"), ("dark", "map-dark.png")):
        await tab.see(file, 1180, 1000, theme)
        await tab.ask(
            "(() => { const box = document.getElementById('search'); box.value = 'layers.3 q_proj';"
            "box.dispatchEvent(new Event('input'));"
            "document.querySelector('#lines [data-tensor]').click(); })()"
        )
        await tab.picture(shown := file.with_suffix(".png"))
        with Image.open(shown) as whole:
            cut = whole.convert("RGB").crop((0, 0, whole.width, 1640))
            cut.quantize(96, dither=Image.Dither.NONE).save(ROOT / "docs" / name, optimize=True)


def weights(path: Path, tensors: list[tuple[str, tuple[int, int]]]) -> None:
    """A safetensors file of zeros, which takes no room on the disk."""
    header, at = {}, 0
    for name, (rows, columns) in tensors:
        end = at + 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


class Tab:
    """A page of the browser, by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.numbers = itertools.count(1)
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.wrong: list[str] = []
        self.loaded = asyncio.Event()
        self.reader = asyncio.create_task(self.listen())

    async def listen(self) -> None:
        """Takes what the browser says, and keeps what is wrong."""
        async for message in self.socket:
            said = json.loads(message.data)
            if said.get("id") in self.answers:
                self.answers.pop(said["id"]).set_result(said)
            method, params = said.get("method", ""), said.get("params", {})
            if method == "Page.loadEventFired":
                self.loaded.set()
            elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                self.wrong.append(f"{method}: {json.dumps(params)[:400]}")
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.wrong.append(f"log: {params['entry']['text'][:300]}")
            elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                self.wrong.append(f"request: {params['request']['url'][:200]}")

    async def call(self, method: str, **params: object) -> Any:
        """The answer of the browser."""
        number = next(self.numbers)
        self.answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(self.answers[number] if number in self.answers else asyncio.sleep(0), 60)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        return said["result"]

    async def see(self, file: Path, width: int, height: int, theme: str) -> None:
        """Opens a page."""
        mobile = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.loaded.clear()
        await self.call("Page.navigate", url=file.as_uri())
        await asyncio.wait_for(self.loaded.wait(), 60)
        await self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    async def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(
                f"{expression[:80]}: {found['exceptionDetails'].get('exception', {}).get('description')}"
            )
        return found["result"].get("value")

    async def press(self, *keys: str) -> None:
        """Presses keys."""
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
                await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def mouse(self, x: float, y: float, *, click: bool = False) -> None:
        """Moves the mouse, and clicks."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def picture(self, file: Path, *, whole: bool = True) -> None:
        """Takes a screenshot."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser(program: str) -> AsyncIterator[Tab]:
    """A tab of a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                   f"--user-data-dir={home}", "--no-first-run", "--disable-background-networking", "about:blank"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(home) / "DevToolsActivePort"
            for _ in range(300):
                if port_file.exists() and port_file.read_text().strip():
                    break
                await asyncio.sleep(0.1)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    target = next(one for one in await answer.json() if one["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await tab.call(f"{domain}.enable")
                    yield tab
        finally:
            process.terminate()
            process.wait(20)


def must(is_so: object, what: str) -> None:
    """Ends the program if it is not so."""
    if not is_so:
        raise SystemExit(f"see_map: {what}")


NAMED = ("button", "link", "searchbox", "combobox", "grid", "table", "image", "img", "application", "region", "Canvas")
"""Roles of which a screen reader says little without a name."""


async def hear(tab: Tab, page: str) -> None:
    """Whatever can be reached, or has a role that needs a name, has one, and the headings leave out no level."""
    nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    told = [node for node in nodes if not node.get("ignored")]
    for node in told:
        role, name = node["role"]["value"], node.get("name", {}).get("value", "")
        reached = any(own["name"] == "focusable" and own["value"]["value"] for own in node.get("properties", ()))
        must(
            name or not (role in NAMED or (reached and role not in ("row", "scrollable"))),
            f"{page}: a {role} has no name",
        )
    levels = await tab.ask("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    must(levels[:1] == [1] and all(b - a < 2 for a, b in itertools.pairwise(levels)), f"{page}: headings {levels}")


async def use(tab: Tab, file: Path) -> None:
    """Mouse and keyboard do what the page says."""
    await tab.see(file, 1280, 900, "light")
    made = await tab.ask("zckptMap(JSON.parse(document.getElementById('data').textContent)).names.length")
    must(
        made == int((await tab.ask("document.getElementById('found').textContent")).split()[0]),
        "the list lacks tensors",
    )
    await tab.ask("document.querySelector('.scroller').focus()")
    await tab.press("Home")
    for _ in range(12):
        await tab.press("ArrowRight")
        if await tab.ask("document.getElementById('live').textContent.includes(' of [')"):
            break
    told = await tab.ask("document.getElementById('live').textContent")
    must(" of [" in told, f"arrow keys say no piece: {told!r}")
    await tab.press("Enter")
    must(await tab.ask("!document.getElementById('detail').hidden"), "Enter keeps no tensor")
    must(await tab.ask("document.querySelectorAll('.pieces tbody tr').length > 0"), "there are no pieces")
    await tab.picture(file.with_name(f"{file.stem}_kept.png"))
    await tab.press("Escape")
    must(await tab.ask("document.getElementById('detail').hidden"), "Escape does not let it go")
    await tab.ask("document.querySelector('h1').focus(); document.activeElement.blur()")
    await tab.press("/")
    must(await tab.ask("document.activeElement.id === 'search'"), "/ does not search")
    await tab.press(*"zzz")
    must(
        await tab.ask("document.querySelectorAll('#lines [data-tensor]').length === 0"),
        "a search finds what is not there",
    )
    await tab.ask(
        "document.getElementById('search').value = ''; document.getElementById('search').dispatchEvent(new Event('input'))"
    )
    await tab.press("ArrowDown", "ArrowDown", "Enter")
    must(await tab.ask("document.querySelector('#lines .kept') !== null"), "the list is not usable with the keyboard")
    await tab.press("Escape")
    await tab.ask("document.querySelector('.scroller').scrollIntoView()")
    box = await tab.ask("(({left, top}) => [left, top])(document.querySelector('.scroller').getBoundingClientRect())")
    for x in range(60, 1200, 3):
        await tab.mouse(box[0] + x, box[1] + 52)
        if await tab.ask("!document.getElementById('tip').hidden && document.querySelector('#tip .mono') !== null"):
            await tab.mouse(box[0] + x, box[1] + 52, click=True)
            break
    must(await tab.ask("!document.getElementById('detail').hidden"), "a click keeps no tensor")
    seen = []
    for _ in range(3):
        await tab.ask("document.getElementById('theme').click()")
        seen.append(
            await tab.ask(
                "[document.documentElement.dataset.theme || '', getComputedStyle(document.body).backgroundColor].join()"
            )
        )
    must(len({*seen}) == 3, f"the switch of light and dark shows {seen}")


async def race(tab: Tab, file: Path) -> dict[str, float]:
    """Milliseconds for searches, steps and the map of 100,000 tensors."""
    await tab.see(file, 1280, 900, "light")
    timed = (
        "(async () => { const began = performance.now(); %s; await new Promise(requestAnimationFrame); "
        "return performance.now() - began; })()"
    )
    search = "const box = document.getElementById('search'); box.value = '%s'; box.dispatchEvent(new Event('input'))"
    steps = {
        "search for a name": search % "layers.77 experts.123", "search with a glob": search % "*.79?.down_proj.weight",
        "all again": search % "", "scroll to the middle": "document.getElementById('list').scrollTop = 1800000",
        "largest first": "const o = document.getElementById('order'); o.value = 'size'; o.dispatchEvent(new Event('input'))",
        "colours": "const c = document.getElementById('colour'); c.value = 'layer'; c.dispatchEvent(new Event('input'))",
    }  # fmt: skip
    found = {what: round(await tab.ask(timed % step), 1) for what, step in steps.items()}
    lines = await tab.ask("document.querySelectorAll('#lines [data-tensor]').length")
    must(0 < lines < 60, f"the list has {lines} lines in the document")
    return found


async def main(folder: Path, program: str, wanted: list[str]) -> None:
    """Looks at all pages, or at those that are wanted."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    async with browser(program) as tab:
        for name, file in pages(folder):
            if wanted and name not in wanted:
                continue
            for (width, height), theme in itertools.product(WIDTHS.items(), ("light", "dark")):
                await tab.see(file, width, height, theme)
                await hear(tab, name)
                wide = await tab.ask("document.documentElement.scrollWidth")
                must(wide <= width, f"{name} is {wide} pixels wide on a screen of {width}")
                await tab.picture(folder / f"{name}_{width}_{theme}.png")
            if name in ("zero3_w8", "3d", "reshard", "boxes", "broken", "lost"):
                await use(tab, file)
            if name == "llama" and wanted:
                await picture_of_the_page(tab, file)
            if name == "giant":
                times = await race(tab, file)
                print(
                    f"100,000 tensors, {file.stat().st_size / 1e6:.1f} MB:",
                    ", ".join(f"{k} {v} ms" for k, v in times.items()),
                )
                must(max(times.values()) < SLOW_MS, "a page of 100,000 tensors is slow")
            must(not tab.wrong, f"{name}: " + "; ".join(tab.wrong[:5]))
            print(f"{name}: seen at {' and '.join(map(str, WIDTHS))} pixels, light and dark")
        tab.reader.cancel()


if __name__ == "__main__":
    known = chromium()
    if known is None:
        print("see_map: there is no Chromium on this machine, so nothing was looked at", file=sys.stderr)
        sys.exit(3)
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".make" / "map", known, sys.argv[2:]))
