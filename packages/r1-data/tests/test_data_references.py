"""Tests of references: every form of a picture or video that a row may hold, and those that are refused."""

import base64
import io
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps

from r1_data.media_cache import MediaCache
from r1_data.pictures import image_size
from r1_data.references import Downloads, Url, Video, digest_content, open_file, resolve_picture, resolve_video
from r1_data.render import Renderer
from r1_data.types import Example, MediaError


def test_pictures_of_every_form_resolve(picture):
    data, image = picture(4, 4), Image.new("RGB", (4, 4))
    assert resolve_picture(data, None) == data
    assert resolve_picture(bytearray(data), None) == data
    assert resolve_picture({"bytes": data, "path": "x.png"}, "/nowhere") == data
    assert resolve_picture({"bytes": None, "path": "a/x.png"}, "/pictures") == Path("/pictures/a/x.png")
    assert resolve_picture("./a/../x.png", "/pictures/") == Path("/pictures/x.png")
    assert resolve_picture("/pictures/x.png", "/pictures") == Path("/pictures/x.png")
    assert resolve_picture("x.png", None) == Path("x.png")
    assert resolve_picture(image, None) is image
    assert resolve_picture(f"data:image/png;base64,{base64.b64encode(data).decode()}", None) == data
    assert resolve_picture("file:///a/my%20x.png", None) == Path("/a/my x.png")
    assert resolve_picture("file://localhost/pictures/x.png", "/pictures") == Path("/pictures/x.png")
    assert resolve_picture("HTTPS://host/x.png", None, Downloads()) == Url("HTTPS://host/x.png", Downloads())


def test_videos_of_every_form_resolve(picture, movie):
    frame, film = picture(4, 4), movie(32, 32, 4)
    assert resolve_video(film, None) == Video(film)
    assert resolve_video("a.mp4", "/videos") == Video(Path("/videos/a.mp4"))
    assert resolve_video({"path": "a.mp4", "bytes": None}, "/videos") == Video(Path("/videos/a.mp4"))
    assert resolve_video([frame, "b.png"], "/videos") == Video((frame, Path("/videos/b.png")))
    assert resolve_video({"frames": [frame, frame], "fps": 4}, None) == Video((frame, frame), 4)
    assert resolve_video({"type": "video", "video": [frame]}, None) == Video((frame,))
    assert resolve_video(f"data:video/mp4;base64,{base64.b64encode(film).decode()}", None) == Video(film)


@pytest.mark.parametrize(
    "path",
    ["../secret.png", "a/../../secret.png", "/etc/secret.png", "/pictures-2/x.png", "..", "file:///etc/%2e%2e/secret"],
)
@pytest.mark.parametrize("resolve", [resolve_picture, resolve_video])
def test_paths_out_of_the_folder_are_refused(resolve, path):
    with pytest.raises(MediaError, match="leads out of the picture folder"):
        resolve(path, "/pictures")


@pytest.mark.parametrize("resolve", [resolve_picture, resolve_video])
def test_a_link_out_of_the_folder_is_refused_and_one_within_it_is_followed(resolve, tmp_path):
    folder, secret = tmp_path / "pictures", tmp_path / "secret"
    (folder / "a").mkdir(parents=True)
    secret.mkdir()
    (secret / "x.png").touch()
    (folder / "a" / "real.png").touch()
    (folder / "file.png").symlink_to(secret / "x.png")
    (folder / "outside").symlink_to(secret)
    (folder / "inside.png").symlink_to("a/real.png")
    (tmp_path / "named").symlink_to(folder)
    for path in ("file.png", "outside/x.png", str(folder / "outside" / "x.png")):
        with pytest.raises(MediaError, match=r"leads out of the picture folder '.*' by a link to '.*secret/x\.png'"):
            resolve(path, str(folder))
    assert resolve("inside.png", str(folder)) == resolve(str(folder / "inside.png"), str(folder))
    assert resolve("a/real.png", str(tmp_path / "named")) == resolve("a/real.png", str(tmp_path / "named") + "/")


def test_links_of_the_hub_s_cache_are_followed_into_its_blobs_alone(tmp_path):
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0a1b" / "images"
    snapshot.mkdir(parents=True)
    (snapshot / "x.png").symlink_to("../../../blobs/7f")
    (snapshot / "y.png").symlink_to("../../../../secret.png")
    for folder in (snapshot, snapshot.parent):
        assert resolve_picture(str(snapshot / "x.png"), str(folder)) == snapshot / "x.png"
        with pytest.raises(MediaError, match="leads out of the picture folder"):
            resolve_picture(str(snapshot / "y.png"), str(folder))


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t"])
def test_white_space_in_a_data_url_is_no_data(picture, space):
    data = picture(40, 40)
    broken = space.join(base64.encodebytes(data).decode().split("\n"))
    assert resolve_picture(f"data:image/png;base64,{broken}", None) == data


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://host/x.png", "only with data.allow_urls=true"),
        ("s3://bucket/x.png", "URLs of kind s3 are not read"),
        ("file://other/x.png", "a file on another machine"),
        ("data:image/png,%89PNG", "a data URL must read"),
        ("data:image/png;base64,AAA", "broken base64"),
        ("a\0b.png", "no zero byte"),
        ("", "an empty path"),
    ],
)
def test_addresses_that_are_not_read_are_refused_by_name(value, message):
    with pytest.raises(MediaError, match=message):
        resolve_picture(value, None)


@pytest.mark.parametrize("value", [None, 3, {}, {"bytes": None, "path": None}, ["x.png"]])
def test_cells_that_are_no_picture_are_refused(value):
    with pytest.raises(MediaError, match="a picture must be bytes, a path, a URL or a PIL image"):
        resolve_picture(value, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "a video of no frames"),
        (3, "a video must be bytes, a path, a URL or a list of frames"),
        ([["x.png"]], "a picture must be"),
        ({"frames": ["x.png"], "fps": 0}, "fps of a video must be above 0"),
        ({"frames": ["x.png"], "fps": "2"}, "fps of a video must be above 0"),
    ],
)
def test_cells_that_are_no_video_are_refused(value, message):
    with pytest.raises(MediaError, match=message):
        resolve_video(value, None)


def test_pipes_and_folders_are_not_opened(tmp_path):
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(MediaError, match="not a file"):
            open_file(path)


@pytest.fixture
def server(picture):
    """The address of a web server with a picture, one that has no end, and one that leads elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302 if self.path == "/away" else 200 if self.path != "/gone" else 404)
            if self.path == "/away":
                self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            self.wfile.write(picture(60, 40) if self.path == "/picture" else bytes(100_000))

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_allowed_pictures_are_fetched_within_limits(server, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    limits = Downloads(max_bytes=50_000, timeout=120)
    assert image_size(resolve_picture(f"{server}/picture", None, limits)) == (40, 60)
    for page, message in (
        ("large", "over 50,000 bytes"), ("gone", "not fetched.*404"), ("away", "(redirected to|not fetched).*file:"),
    ):  # fmt: skip
        with pytest.raises(MediaError, match=f"{server}/{page}.*{message}"):
            image_size(resolve_picture(f"{server}/{page}", None, limits))


def test_a_picture_that_changed_behind_its_url_is_not_taken_from_the_cache(picture, processor, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served, asked = [picture(60, 40)], []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(served[-1])

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = resolve_picture(f"http://127.0.0.1:{server.server_port}/x", None, Downloads())
    renderer = Renderer(processor, cache=MediaCache(2**20, tmp_path, 2**20))
    example = Example("t:1", [{"role": "user", "content": [{"type": "image"}]}], (url,), "1")
    before = renderer.load(example).images[0]
    assert len(asked) == 1
    assert len(list(tmp_path.rglob("*.npy"))) == 1
    renderer.load(example)
    assert len(list(tmp_path.rglob("*.npy"))) == 1  # the same content is kept once
    buffer = io.BytesIO()
    ImageOps.invert(Image.open(io.BytesIO(served[0])).convert("RGB")).save(buffer, "PNG")
    served.append(buffer.getvalue())
    assert not torch.equal(renderer.load(example).images[0], before)
    assert digest_content(url) == digest_content(served[-1])
    served.append(served[-1][:80])
    with pytest.raises(MediaError, match=rf"t:1: picture {url.address}: the picture cannot be read"):
        renderer.load(example)
    with pytest.raises(MediaError, match=rf"video {url.address}: not a video"):
        renderer.load(replace(example, media=(Video(url),)))
    server.shutdown()
    server.server_close()
