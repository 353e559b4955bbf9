"""How pages look, and the few lines of script that they need besides nicegui's."""

from esper.karn.film_page import FILM_RULES, FILM_SCRIPT
from esper.karn.page import Markup, element, styles

_RULES = """
body{overflow-wrap:break-word}
.nicegui-content{display:block;padding:0;width:100%}
main.q-page{max-width:none;padding:0}
.view,p.status,header.top>div{max-width:1120px;margin:0 auto;box-sizing:border-box;padding:0 1rem}
.view{padding-bottom:3rem}
header.top{background:var(--panel);border-bottom:1px solid var(--faint);padding:.5rem 0}
header.top h1{font-size:1.15rem;margin:0 0 .25rem;overflow-wrap:anywhere}
header.top nav{display:flex;flex-wrap:wrap;gap:.25rem .35rem}
header.top nav a{margin:0;padding:.4rem .55rem;border-radius:6px;text-decoration:none}
header.top nav a:first-child{padding-left:0}
header.top nav a[aria-current]{background:var(--blue);color:var(--paper);padding:.4rem .55rem}
p.status{color:var(--muted);font-size:.9rem;min-height:1.4em;margin:.5rem auto}
.status progress{width:8rem;max-width:40vw;height:.7rem;vertical-align:middle}
.error{border-left:4px solid var(--vermilion);padding:.25rem .75rem;overflow-wrap:anywhere}
.chooser,.row{display:flex;flex-wrap:wrap;gap:.5rem;align-items:center;margin:.75rem 0;max-width:none}
input,select,textarea,form button,.button{font:inherit;color:var(--ink);background:var(--paper);
 border:1px solid var(--muted);border-radius:6px;padding:.3rem .6rem;min-height:2.2rem;box-sizing:border-box}
input[type=number]{width:5.5rem}
form button,.button{background:var(--panel);cursor:pointer;text-decoration:none;display:inline-block}
textarea{width:100%;font-family:monospace;display:block;margin-bottom:.5rem}
input[type=checkbox]{width:1.3rem;height:1.3rem;min-height:0;accent-color:var(--blue)}
input[type=range]{padding:0;border:0;accent-color:var(--blue)}
table.fleet,table.runs{width:auto}
.fleet td,.fleet th,.runs td,.runs th{padding:.15rem .5rem;min-width:0!important;vertical-align:middle}
.fleet th{white-space:nowrap}
.fleet td.slots,.fleet th:nth-child(2),.runs td,.runs th{text-align:left}
.runs td,.runs th{padding:.4rem .75rem}
.slot{position:relative;display:inline-block;width:1.75rem;height:1.75rem;line-height:1.55rem;margin:1px;
 text-align:center;font-weight:700;font-size:.85rem;border-radius:5px;border:1px solid var(--faint);color:var(--muted);
 overflow:hidden;box-sizing:border-box;vertical-align:middle}
.slot i{position:absolute;left:0;bottom:0;height:4px;background:var(--ink)}
.spark{width:96px;height:24px;display:block}
.spark polyline{fill:none;stroke:var(--blue);stroke-width:1.6}
.spark .zero{stroke:var(--muted);stroke-width:.8;stroke-dasharray:3 3}
.keys b{display:inline-block;width:1.5em;line-height:1.5em;text-align:center;border-radius:5px;margin-right:.4em}
.log{list-style:none;padding:0;margin:.5rem 0}.log li{padding:.2rem 0;border-bottom:1px solid var(--faint)}
.log b{display:inline-block;min-width:4.5rem;font-weight:600}
h1,h2,h3{letter-spacing:normal;line-height:1.25;font-weight:600}
h1{font-size:1.15rem}h2{font-size:1.25rem}h3{font-size:1rem}
a{color:var(--blue)}
@media (max-width:600px){
 dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}
 .spark{width:72px}
 .wide thead{display:none}
 .wide table,.wide tbody,.wide caption,.wide tr,.wide th,.wide td{display:block;max-width:none;text-align:left}
 .wide tr{border-bottom:1px solid var(--faint);padding:.3rem 0}
 .wide th,.wide td{border:0;padding:.1rem 0}
 .wide tbody th{font-weight:600}
 .wide td{display:flex;justify-content:space-between;gap:1rem}
 .wide td::before{content:attr(data-head);color:var(--muted)}
 .wide td:empty{display:none}
 .runs thead{display:none}
 .wide .runs tr{display:flex;flex-wrap:wrap;align-items:center;border-bottom:1px solid var(--faint);padding:.25rem 0}
 .wide .runs td,.wide .runs th{display:block;border:0;padding:.1rem .4rem}
 .runs tr::after{content:"";order:1;width:100%}
 .runs td:nth-child(n+3){order:2;color:var(--muted)}
}
"""
_SCRIPT = """
new MutationObserver(()=>document.querySelectorAll(".film").forEach(esperFilm))
 .observe(document,{childList:true,subtree:true});
document.addEventListener("esper-step",event=>{
 const here=new URL(location.href);
 here.searchParams.set("step",event.detail);
 history.replaceState(history.state,"",here);
 document.querySelectorAll("a[data-png]").forEach(link=>{
  const to=new URL(link.href);to.searchParams.set("step",event.detail);link.href=to.pathname+to.search});
});
"""


def head() -> Markup:
    """What every page has in its head."""
    return Markup(styles(FILM_RULES + _RULES) + element("script", Markup(FILM_SCRIPT + _SCRIPT)))
