"""The calls in a pickle that are reported as an attack.

For the pickle machine. The list need not be complete to be safe: a function that is not in it is not called either, but
becomes a `Placeholder`. It holds the functions that pickle scanners and reports of attacks name; add others by hand.
"""

from __future__ import annotations

import functools

from zckpt.containers.inert import Placeholder

_MODULES = """
os posix nt subprocess _posixsubprocess commands popen2 pty runpy code codeop pdb bdb timeit profile cProfile trace
doctest pydoc inspect importlib imp pkgutil zipimport pip ensurepip setuptools distutils venv ctypes _ctypes cffi
marshal pickle _pickle cPickle shelve shutil tempfile signal threading _thread multiprocessing asyncio sys gc webbrowser
socket _socket ftplib smtplib telnetlib requests aiohttp httpx _winapi winreg
"""
MODULES = frozenset(_MODULES.split())
"""Modules without plain data: a call of anything in them is an attack."""

_HARMLESS = "os.stat_result os.terminal_size signal.Signals socket.AddressFamily socket.SocketKind threading.local"
HARMLESS = frozenset(_HARMLESS.split())
"""The exceptions: plain data in these modules."""

_FUNCTIONS = """
builtins.eval builtins.exec builtins.execfile builtins.compile builtins.open builtins.__import__ builtins.getattr
builtins.setattr builtins.delattr builtins.globals builtins.locals builtins.vars builtins.input builtins.breakpoint
builtins.apply builtins.help io.open io.open_code io.FileIO _io.open _io.FileIO codecs.open linecache.getline
operator.methodcaller operator.attrgetter _operator.methodcaller _operator.attrgetter types.FunctionType types.CodeType
urllib.request.urlopen urllib.request.urlretrieve http.client.HTTPConnection http.client.HTTPSConnection
http.server.HTTPServer logging.config._resolve logging.config.listen uuid._popen platform.popen
torch.load torch.serialization.load torch.jit.load torch.hub.load torch.hub.download_url_to_file
torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline torch.utils.collect_env.run
torch.fx.graph_module._exec_with_source torch._inductor.codecache.compile_file
numpy.load numpy.fromfile numpy.memmap numpy.lib.npyio.load numpy.testing.runstring
numpy.testing._private.utils.runstring numpy.f2py.crackfortran.myeval numpy.f2py.capi_maps.getinit
joblib.load pandas.read_pickle yaml.load yaml.unsafe_load lib2to3.pgen2.pgen.ParserGenerator
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""Functions of other modules that run code, load pickles, or open files and connections."""


def runs_code(function: Placeholder) -> bool:
    """Whether calling this function would run code."""
    return not function.called and _runs_code(function.module, function.name)


@functools.lru_cache(maxsize=1024)
def _runs_code(module: str, name: str) -> bool:
    full = f"{module}.{name}"
    owners = name.split(".")[:-1]  # protocol 4 follows attributes: 'torch', 'os.system'
    known = full in FUNCTIONS or module.split(".")[0] in MODULES or not MODULES.isdisjoint(owners)
    return known and full not in HARMLESS
