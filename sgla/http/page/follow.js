// Keeps the end of a scrolled element in sight while it grows, until the reader scrolls up.
const NEAR = 40; // pixels from the end that still count as the end

export class Follower {
  constructor(frame, content, jump) {
    Object.assign(this, { frame, jump, on: true, top: 0 });
    frame.addEventListener("scroll", () => this.scrolled());
    jump.onclick = () => this.follow();
    const watcher = new ResizeObserver(() => this.grown());
    watcher.observe(content);
    watcher.observe(frame);
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.frame;
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.on = true;
    else if (scrollTop < this.top) this.on = false; // growth alone never moves it up
    this.top = scrollTop;
    this.jump.hidden = this.on;
  }

  grown() {
    if (this.on) this.frame.scrollTop = this.frame.scrollHeight;
    this.scrolled();
  }

  follow() {
    this.on = true;
    this.grown();
  }
}
