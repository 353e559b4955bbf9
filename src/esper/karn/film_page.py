"""Films on a page: a drawing as SVG, with a slider that moves through the steps and a button that plays them.

Each moving shape has a track: its attributes at the frames where they change. The script knows nothing of networks; it
sets attributes. Without it the page shows one step. Texts reach the page as attributes and text nodes, never as HTML.
A drawing that replaces another of the same id, because the run went on, stays at the step that the reader chose.
"""

import json
from html import escape

from esper.karn.film import Film
from esper.karn.film_layout import WIDTH, Circle, Line, Rect, Shape, Text, height, moving, still
from esper.karn.page import Markup, element
from esper.karn.palette import PAPER, themed

Attributes = dict[str, str]
FILM_CAPTION = (
    "The network after each step. Grey blocks are the host, in the order in which data pass them. A seed hangs over its"
    " slot under the name of its blueprint: colour and letter are its stage, and it swells with its alpha (α). Below,"
    " the curve up to the step; a faint curve is still to come. Dashed: the control, if there is one."
)
TEXT = "text"
"""The key of an element's content among its attributes"""
FILM_RULES = """
.film{max-width:720px}
.film svg{display:block;width:100%;height:auto}
.film circle{transition:r .2s}
.film .controls{display:flex;align-items:center;gap:.6rem;margin-top:.4rem}
.film input{flex:1;min-width:0;height:2rem}
.film button{font:inherit;min-width:5rem;min-height:2.2rem;color:var(--ink);background:var(--panel);border:1px solid
 var(--muted);border-radius:6px;cursor:pointer}
@media (prefers-reduced-motion:reduce){.film circle{transition:none}}
@media print{.film .controls{display:none}}
"""
FILM_SCRIPT = """
function esperFilm(root){
 if(root.dataset.ready)return;root.dataset.ready="1";
 const data=JSON.parse(root.querySelector(".tracks").textContent),moving=root.querySelector("g").children,
  slider=root.querySelector("input"),button=root.querySelector("button"),kept=esperFilm.kept;
 let timer=null;
 function show(){
  const frame=+slider.value;
  data.tracks.forEach((track,i)=>{
   let now={};
   for(const [from,attributes] of track){if(from>frame)break;now=attributes}
   for(const [name,value] of Object.entries(now))
    if(name==="text")moving[i].textContent=value;else moving[i].setAttribute(name,value);
  });
  slider.setAttribute("aria-valuetext","step "+data.steps[frame]);
 }
 function tell(){
  kept[root.id]=+slider.value<+slider.max?data.steps[+slider.value]:null;
  root.dispatchEvent(new CustomEvent("esper-step",{bubbles:true,detail:data.steps[+slider.value]}));
 }
 function stop(){clearInterval(timer);timer=null;esperFilm.playing=null;button.textContent="\\u25b6 play";tell()}
 function next(){
  if(!root.isConnected){clearInterval(timer);return}
  if(+slider.value>=+slider.max)return stop();
  slider.value=+slider.value+1;kept[root.id]=data.steps[+slider.value];show();
 }
 function play(){
  if(timer)return stop();
  if(+slider.value>=+slider.max)slider.value=0;
  esperFilm.playing=root.id;button.textContent="\\u275a\\u275a stop";show();
  timer=setInterval(next,Math.max(40,9000/data.steps.length));
 }
 if(kept[root.id]!=null)slider.value=data.steps.filter(step=>step<=kept[root.id]).length-1;
 slider.addEventListener("input",()=>{clearInterval(timer);timer=null;button.textContent="\\u25b6 play";show();tell()});
 button.addEventListener("click",play);
 show();
 if(esperFilm.playing===root.id)play();
}
esperFilm.kept={};
"""
START_FILMS = "document.querySelectorAll('.film').forEach(esperFilm);"


def film_element(film: Film, name: str, caption: str, step: int | None = None) -> Markup:
    """The drawing at a step (default: the last) with slider and button. `name` is the prefix of its ids."""
    last = len(film.frames) - 1
    at = last if step is None else sum(frame.step <= step for frame in film.frames[1:])
    shapes = [*map(_svg, still(film)), element("g", *map(_svg, moving(film, film.frames[at])))]
    named = {"viewBox": f"0 0 {WIDTH:g} {height(film):g}", "role": "img", "aria-labelledby": f"{name}-caption"}
    drawing = element("svg", *shapes, **named)
    controls = element(
        "div",
        element("button", "▶ play", type="button"),
        Markup(f'<input type="range" min="0" max="{last}" value="{at}" aria-label="step">'),
        class_="controls",
    )
    # Quotes need no escape between tags, and it has many.
    data = element("div", Markup(escape(_json(film), quote=False)), class_="tracks", hidden="")
    return element(
        "figure", drawing, controls, data, element("figcaption", caption, id=f"{name}-caption"), class_="film", id=name
    )


def film_scripts() -> Markup:
    """What a page with films needs, after the last of them."""
    return element("script", Markup(FILM_SCRIPT + START_FILMS))


def _json(film: Film) -> str:
    frames = [[_attributes(shape) for shape in moving(film, frame)] for frame in film.frames]
    tracks = list[list[tuple[int, Attributes]]]()
    for place in range(len(frames[0])):
        track = [(0, frames[0][place])]
        for number, shapes in enumerate(frames[1:], 1):
            if shapes[place] != frames[number - 1][place]:
                track.append((number, shapes[place]))
        # Attributes that never change are in the drawing already.
        steady = {key for key, value in track[0][1].items() if all(entry.get(key) == value for _, entry in track)}
        tracks.append([(at, {k: v for k, v in entry.items() if k not in steady}) for at, entry in track])
    data = {"steps": [frame.step for frame in film.frames], "tracks": tracks}
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def _svg(shape: Shape) -> Markup:
    attributes = _attributes(shape)
    tag = {Rect: "rect", Circle: "circle", Line: "polyline", Text: "text"}[type(shape)]
    return element(tag, attributes.pop(TEXT, ""), **attributes)


def _attributes(shape: Shape) -> Attributes:
    """The attributes of an SVG element; `text` is its content."""
    if isinstance(shape, Rect):
        places = {"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height, "rx": shape.round}
        paint = {"fill": "var(--paper)" if shape.fill == PAPER else themed(shape.fill), "opacity": f"{shape.opacity:g}"}
    elif isinstance(shape, Circle):
        places = {"cx": shape.x, "cy": shape.y, "r": shape.radius}
        fill = "var(--paper)" if shape.fill == PAPER else themed(shape.fill)
        paint = {"fill": fill, "stroke": themed(shape.stroke), "stroke-width": "1.2"}
    elif isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dashes = {"stroke-dasharray": "5 5"} if shape.dashed else {}
        paint = {"points": points, "fill": "none", "stroke": themed(shape.stroke), **dashes}
        places = {"stroke-width": shape.width}
    else:
        places = {"x": shape.x, "y": shape.y, "font-size": shape.size}
        weight = {"font-weight": "bold"} if shape.bold else {}
        paint = {"text-anchor": shape.anchor, "fill": themed(shape.fill), **weight, TEXT: shape.text}
    return {name: f"{value:.4g}" for name, value in places.items()} | paint
